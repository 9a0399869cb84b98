// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/program"
)

// swarmImage is the image under a name that is asked for where nobody listens: Swarm pulls
// before it takes what is there.
const swarmImage = "127.0.0.1:1/bb"

// ingressChain has dockerd's rules of the ports that a swarm publishes on each node.
const ingressChain = "DOCKER-INGRESS"

// startSwarm makes the engine a manager of a swarm of its own until the test ends.
func startSwarm(t testing.TB) {
	t.Helper()
	dockerImage(t)
	run(t, "docker", "tag", "bb", swarmImage)
	run(t, "docker", "swarm", "init", "--advertise-addr", nodeAddr)
	t.Cleanup(func() { _, _ = try("docker", "swarm", "leave", "--force") })

	// What dockerd makes with its first published port, where the kernel has IPVS. Before that
	// it empties the chain, which an earlier one may have left.
	run(t, "iptables", "-t", "nat", "-N", ingressChain)
	for _, hook := range []string{"PREROUTING", "OUTPUT"} {
		run(t, "iptables", "-t", "nat", "-I", hook, "-m", "addrtype", "--dst-type", "LOCAL", "-j", ingressChain)
	}
	run(t, "iptables", "-t", "nat", "-A", ingressChain, "-j", "RETURN")
	createService(t, "first", "-p", "8099:80")
	run(t, "sysctl", "-qw", "net.ipv4.conf.docker_gwbridge.route_localnet=1")
	run(t, "iptables", "-t", "nat", "-I", "POSTROUTING", "-o", "docker_gwbridge", "-m", "addrtype", "--src-type", "LOCAL", "-j", "MASQUERADE")
	run(t, "docker", "service", "rm", "first")
	eventually(t, func() error {
		if rules := run(t, "iptables", "-t", "nat", "-S", ingressChain); strings.Contains(rules, "RETURN") {
			return fmt.Errorf("the engine has not emptied its chain: %s", rules)
		}
		return nil
	})
}

// createService creates a service that serves at port 80 of its tasks, and waits until the
// first one runs.
func createService(t testing.TB, name string, flags ...string) {
	t.Helper()
	args := append([]string{"service", "create", "-d", "--no-resolve-image", "--stop-grace-period", "0s", "--name", name}, flags...)
	run(t, "docker", append(args, swarmImage, "httpd", "-f", "-p", "80", "-h", "/etc")...)
	eventually(t, func() error {
		if task(t, name) == "" {
			return fmt.Errorf("no task of service %s runs", name)
		}
		return nil
	})
}

// task is the id of the container of a service's task, "" if none runs.
func task(t testing.TB, service string) string {
	t.Helper()
	return run(t, "docker", "ps", "-q", "--no-trunc", "--filter", "label=com.docker.swarm.service.name="+service)
}

// ingress opens a published port as dockerd does: a rule that leads to the ingress sandbox,
// and a socket of all addresses that nobody accepts at. This kernel has no IPVS, without
// which dockerd opens none, so that a server in the sandbox stands for those of the tasks.
// The port is closed when close is called.
func ingress(t testing.TB, proto string, n int) (closePort func()) {
	t.Helper()
	number := strconv.Itoa(n)
	var sandbox string
	eventually(t, func() (err error) {
		const format = `{{with index .Containers "ingress-sbox"}}{{.IPv4Address}}{{end}}`
		sandbox, _, _ = strings.Cut(run(t, "docker", "network", "inspect", "-f", format, "docker_gwbridge"), "/")
		if sandbox == "" {
			err = fmt.Errorf("the ingress sandbox has no address")
		}
		return err
	})
	rule := []string{"-t", "nat", "-A", ingressChain, "-p", proto, "-m", proto, "--dport", number, "-j", "DNAT", "--to-destination", sandbox + ":" + number}
	run(t, "iptables", rule...)
	space, err := netns.Open("/run/docker-exec/netns/ingress_sbox")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = space.Close() }()
	server, err := answerIn(space, proto, ":"+number)
	if err != nil {
		t.Fatal(err)
	}
	// It is called dockerd, accepts, and never answers.
	own := filepath.Join(t.TempDir(), "dockerd")
	run(t, "cp", "/bin/busybox", own)
	flags := []string{"busybox", "nc", "-ll", "-p", number, "-e", "sleep", "1000"}
	if proto == "udp" {
		flags = slices.Insert(flags, 2, "-u")
	}
	reserved, err := program.Launch(program.Command{Cmd: &exec.Cmd{Path: own, Args: flags}})
	if err != nil {
		t.Fatal(err)
	}
	open := true
	closePort = func() {
		if !open {
			return
		}
		open = false
		rule[2] = "-D"
		_, _ = try("iptables", rule...)
		reserved.Stop(syscall.SIGKILL)
		_ = server.Close()
	}
	t.Cleanup(closePort)
	return closePort
}

// answerIn answers everything at an address of a namespace until it is closed.
func answerIn(space *netns.Space, proto, addr string) (io.Closer, error) {
	const answer = "HTTP/1.0 200 ingress"
	if proto == "udp" {
		l, err := space.ListenPacket(proto, addr)
		if err != nil {
			return nil, err
		}
		go func() {
			b := make([]byte, 1500)
			for {
				_, from, err := l.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = l.WriteTo([]byte(answer), from)
			}
		}()
		return l, nil
	}
	l, err := space.Listen(proto, addr)
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				_ = c.SetDeadline(time.Now().Add(10 * time.Second))
				_, _ = io.WriteString(c, answer)
				_ = c.(*net.TCPConn).CloseWrite()
				_, _ = io.Copy(io.Discard, c)
			}()
		}
	}()
	return l, nil
}

// prints waits until a command of the guest's agent prints a text, whatever its exit status.
func (p *peers) prints(text string, args ...string) {
	p.t.Helper()
	eventually(p.t, func() error {
		out, err := exec.Command(binary(), append(args, "--control", p.control)...).CombinedOutput()
		if strings.Contains(string(out), text) {
			return nil
		}
		return fmt.Errorf("fairlead %s prints\n%s\n(%v), want %q", strings.Join(args, " "), out, err, text)
	})
}

// A port that a swarm publishes on each node is its service's, while the service publishes
// it, through restarts of the agent and the host. A port in host mode is its task's container's.
func TestDockerSwarmServices(t *testing.T) {
	p := startPeers(t, "--config", denySecrets(t), "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket)
	dockerd(t)
	startSwarm(t)
	createService(t, "shop_web", "-l", "com.docker.stack.namespace=shop", "-p", "8080:80", "-p", "9053:53/udp")
	web := ingress(t, "tcp", 8080)
	ingress(t, "udp", 9053)
	for _, key := range []string{"tcp 0.0.0.0:8080", "udp 0.0.0.0:9053"} {
		p.owned(key, port.OwnerService, "web")
		if o := p.reach(key, "ingress").Owner; o.Namespace != "shop" || o.Labels["com.docker.stack.namespace"] != "shop" {
			t.Errorf("%s is owned by %+v, want stack shop", key, o)
		}
	}
	p.prints("web", "ls")
	p.prints("Swarm service shop_web, ingress", "explain", "8080")
	p.prints("Swarm service shop_web, ingress", "explain", "9053/udp")

	createService(t, "hosted", "-p", "published=8081,target=80,mode=host")
	name := strings.TrimPrefix(run(t, "docker", "inspect", "-f", "{{.Name}}", task(t, "hosted")), "/")
	p.owned("tcp 0.0.0.0:8081", port.OwnerContainer, name)
	p.reach("tcp 0.0.0.0:8081", "HTTP/1.")

	// A rule denies a service by its name before and after it is there.
	createService(t, "secret", "-p", "8090:80")
	secret := ingress(t, "tcp", 8090)
	p.state("tcp 0.0.0.0:8090", port.Denied)
	p.shut(8090)
	run(t, "docker", "service", "rm", "secret") // of which the rules are left for a moment
	p.state("tcp 0.0.0.0:8090", port.Pending)
	p.shut(8090)
	secret()
	p.gone("tcp 0.0.0.0:8090")

	p.restarts(func(string) {
		t.Helper()
		p.owned("tcp 0.0.0.0:8080", port.OwnerService, "web")
		p.prints("Swarm service shop_web, ingress", "explain", "8080")
		p.reach("tcp 0.0.0.0:8080", "ingress")
		p.getsAt(8081, "404")
	})

	run(t, "docker", "service", "update", "-d", "--publish-rm", "80", "--publish-add", "8082:80", "shop_web")
	web()
	ingress(t, "tcp", 8082)
	p.owned("tcp 0.0.0.0:8082", port.OwnerService, "web")
	p.reach("tcp 0.0.0.0:8082", "ingress")
	p.gone("tcp 0.0.0.0:8080")
	run(t, "docker", "service", "scale", "-d", "shop_web=0")
	p.prints("it is scaled to 0", "explain", "8082")
	run(t, "docker", "service", "rm", "shop_web")
	p.prints("ingress-sbox", "explain", "8082")

	// A node that leaves the swarm says nothing of services.
	createService(t, "other", "-p", "8083:80")
	p.owned("tcp 0.0.0.0:8083", port.OwnerService, "other")
	run(t, "docker", "swarm", "leave", "--force")
	p.gone("tcp 0.0.0.0:8083")
}
