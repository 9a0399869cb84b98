// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/kit/cluster"
)

// forward runs `fairlead forward` in the guest, and returns its output.
func (p *peers) forward(args ...string) string {
	p.t.Helper()
	return run(p.t, binary(), append([]string{"forward", "--control", p.control}, args...)...)
}

// rule waits until `fairlead forward ls` shows a state and a part of a reason of a rule.
func (p *peers) rule(name string, s port.State, reason string) {
	p.t.Helper()
	eventually(p.t, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		f, err := status.NewClient(p.control).Forwards(ctx)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(f.Requests, func(r status.Requested) bool { return r.Request.String() == name })
		if i < 0 || f.Requests[i].State != s.String() || !strings.Contains(f.Requests[i].Reason, reason) {
			return fmt.Errorf("requests %+v: want %q %s with reason %q", f.Requests, name, s, reason)
		}
		return nil
	})
}

// says waits until a client on the host reads a text at a port of the loopback.
func (p *peers) says(n uint16, text string) {
	p.t.Helper()
	eventually(p.t, func() error {
		c, err := p.outside.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", n))
		if err != nil {
			return err
		}
		got, err := answer(c)
		if err == nil && !strings.Contains(got, text) {
			err = fmt.Errorf("port %d says %q, want %q", n, got, text)
		}
		return err
	})
}

// answer reads what a server says without being asked.
func answer(c net.Conn) (string, error) {
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	b, err := io.ReadAll(c)
	return string(b), err
}

// shut waits until nobody listens at a port of the host.
func (p *peers) shut(n uint16) {
	p.t.Helper()
	eventually(p.t, func() error {
		c, err := p.outside.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", n))
		if err == nil {
			_ = c.Close()
			return fmt.Errorf("port %d is open", n)
		}
		return nil
	})
}

// serving are the arguments that run a container which says a text at its port 8000 and
// publishes nothing.
func serving(name, says string, more ...string) []string {
	return append(append([]string{"run", "-d", "--name", name}, more...), "bb", "sh", "-c", "nc -ll -p 8000 -e echo "+says)
}

// asksForWeb asks for the port of a container before there is one, and runs it with an engine's
// command; then another takes its place, then the agent and the host are killed.
func (p *peers) asksForWeb(engine func(args ...string)) {
	p.t.Helper()
	if out := p.forward("add", "web:8000", "--to", "18000"); !strings.Contains(out, "no running container has the name web") {
		p.t.Errorf("add says %q", out)
	}
	engine(serving("web", "first")...)
	p.says(18000, "first")
	p.rule("forward web:8000/tcp", port.Active, "")
	p.replaceWeb(engine, "second")
	p.restart(18000, "second")
}

// replaceWeb runs another web, after a container that takes the address of the first one.
func (p *peers) replaceWeb(engine func(args ...string), text string) {
	p.t.Helper()
	engine("rm", "-f", "web")
	p.rule("forward web:8000/tcp", port.Pending, "no running container has the name web")
	p.shut(18000)
	engine(serving("other", "other")...)
	engine(serving("web", text)...)
	p.says(18000, text)
}

// restart kills the agent and then the host; a port of the loopback says a text after each.
func (p *peers) restart(n uint16, text string) {
	p.t.Helper()
	p.restarts(func(string) {
		p.t.Helper()
		p.says(n, text)
	})
}

// hosted asks for a port of a container in the guest's network, of which the engine gives no
// address: what to do instead is said.
func (p *peers) hosted(engine func(args ...string), to string) {
	p.t.Helper()
	engine(serving("hosted", "hosted", "--network", "host")...)
	p.forward("add", "hosted:8000", "--to", to)
	p.rule("forward hosted:8000/tcp", port.Pending, "`fairlead forward add 8000/tcp`")
	p.forward("rm", "hosted:8000")
}

// A container's port that nobody published is reached by the container's name, follows it to
// another address, and is gone with it, through restarts of the agent, the host and the engine.
func TestDockerForwardsOnDemand(t *testing.T) {
	d := dockerd(t)
	dockerImage(t)
	file := filepath.Join(t.TempDir(), "forwards.json")
	p, _ := readyPeers(t, "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket, "--forwards-file", file)
	engine := func(args ...string) { run(t, "docker", args...) }
	p.asksForWeb(engine)
	d.Stop(syscall.SIGTERM) // ends its containers
	p.shut(18000)
	d.run(t)
	dockerReady(t, d)
	run(t, "docker", "start", "web")
	p.says(18000, "second")

	p.hosted(engine, "18001")
	p.forward("rm", "web:8000")
	p.shut(18000)
}

// A deny rule of the configuration wins over what is asked for by name.
func TestDockerDeniesOnDemand(t *testing.T) {
	dockerd(t)
	dockerImage(t)
	config := denySecrets(t)
	p, _ := readyPeers(t, "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket, "--config", config,
		"--forwards-file", filepath.Join(t.TempDir(), "forwards.json"))
	run(t, "docker", serving("secret", "secret", "--label", "secret=yes")...)
	p.forward("add", "secret:8000", "--to", "18000")
	p.rule("forward secret:8000/tcp", port.Denied, "denied by rule 1")
	p.shut(18000)
}

// The same of nerdctl's containers, which no rule of CNI publishes. Those that run survive
// their engine, and stay reachable while it is away.
func TestContainerdForwardsOnDemand(t *testing.T) {
	d := startContainerd(t)
	containerdImage(t)
	p, _ := readyPeers(t, "--source", "socket,nat,containerd", "--containerd-socket", containerdSocket,
		"--forwards-file", filepath.Join(t.TempDir(), "forwards.json"))
	engine := func(args ...string) { must(t, args...) }
	p.asksForWeb(engine)
	d.Stop(syscall.SIGKILL)
	p.says(18000, "second")
	d.run(t)
	containerdReady(t, d)
	must(t, "stop", "web")
	p.rule("forward web:8000/tcp", port.Pending, "no running container has the name web")
	p.shut(18000)
	must(t, "start", "web")
	p.says(18000, "second")

	// Two containers of one name, in two namespaces: each is named by its own.
	if _, err := nerdctl("other", "load", "-i", imageArchive(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := nerdctl("other", serving("web", "third")...); err != nil {
		t.Fatal(err)
	}
	p.rule("forward web:8000/tcp", port.Pending, "name one of default/web, other/web")
	p.shut(18000)
	p.forward("add", "other/web:8000", "--to", "18001")
	p.says(18001, "third")

	p.hosted(engine, "18002")
	p.forward("rm", "web:8000")
	p.forward("rm", "other/web:8000")
	p.shut(18001)
}

// So is a Service that only the cluster reaches, through restarts of the agent, the host and the
// API server.
func TestKubeForwardsOnDemand(t *testing.T) {
	c := startCluster(t)
	pod := startPod(t, "192.168.77.10")
	c.startProxy("iptables")
	p, _ := readyPeers(t, "--source", "socket,nat,kube", "--kubeconfig", c.Kubeconfig, "--forwards-file", filepath.Join(t.TempDir(), "forwards.json"))
	p.forward("add", "svc/default/web:80", "--to", "18080")
	p.rule("forward svc/default/web:80/tcp", port.Pending, "there is no Service default/web")
	c.service("web", "ClusterIP", nil, svcPort("t", "TCP", 80, 0))
	p.rule("forward svc/default/web:80/tcp", port.Pending, "has no ready endpoints")
	c.endpoints("web", "server", pod, obj{"name": "t", "protocol": "TCP", "port": 8080})
	p.says(18080, podSays)
	p.rule("forward svc/default/web:80/tcp", port.Active, "")
	p.restart(18080, podSays)
	c.api.Stop(syscall.SIGKILL)
	p.says(18080, podSays)
	c.api.run(t)
	c.ready()
	c.must("DELETE", cluster.Services+"/web", nil)
	p.shut(18080)
	p.rule("forward svc/default/web:80/tcp", port.Pending, "there is no Service default/web")
	c.service("web", "ClusterIP", nil, svcPort("t", "TCP", 80, 0)) // its endpoints were left
	p.says(18080, podSays)
}
