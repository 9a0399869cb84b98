// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/kit/gvtools"
)

// tools is the directory of gvproxy and vm.
var tools = sync.OnceValues(func() (string, error) {
	dir := filepath.Join(scratch, "gvproxy")
	return dir, gvtools.Build(dir)
})

// virtualNetwork is a host with gvproxy and a guest behind it, as Podman machine
// and Rancher Desktop have them.
type virtualNetwork struct {
	t              *testing.T
	guest, outside *space
	dir, bin       string
	proxy          *process
}

const (
	apiURL = "http://" + gvtools.API
	// sshForward is gvproxy's own, to the same guest.
	sshForward = "tcp 127.0.0.1:2222 " + gvtools.GuestIP + ":22"
)

func newVirtualNetwork(t *testing.T) *virtualNetwork {
	t.Helper()
	bin, err := tools()
	if err != nil {
		t.Fatal(err)
	}
	n := &virtualNetwork{t: t, guest: newSpace(t), outside: newSpace(t), dir: t.TempDir(), bin: bin}
	n.startProxy()
	n.startTool(n.guest, gvtools.VM(n.bin, n.socket()))
	n.awaitAPI()
	return n
}

func (n *virtualNetwork) socket() string { return filepath.Join(n.dir, "network.sock") }

func (n *virtualNetwork) startProxy() {
	n.t.Helper()
	_ = os.Remove(n.socket())
	n.proxy = n.startTool(n.outside, gvtools.Proxy(n.bin, n.socket()))
}

func (n *virtualNetwork) startTool(s *space, cmd *exec.Cmd) *process {
	n.t.Helper()
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "GOTRACEBACK=none"}
	return s.startCmd(n.t, filepath.Base(cmd.Path), cmd)
}

// awaitAPI waits until the guest reaches the forwarder.
func (n *virtualNetwork) awaitAPI() {
	n.t.Helper()
	wait.Until(n.t, "there is a tap device", func() error { return n.guest.Do(gvtools.Configure) })
	wait.Until(n.t, "the guest reaches gvproxy", func() error { _, err := n.forwards(); return err })
}

// forwards is what gvproxy lists, as the guest sees it.
func (n *virtualNetwork) forwards() ([]string, error) {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, addr string) (c net.Conn, err error) {
			err = n.guest.Do(func() error { c, err = net.DialTimeout(network, addr, 2*time.Second); return err })
			return c, err
		},
	}
	client := http.Client{Transport: transport, Timeout: 20 * time.Second}
	resp, err := client.Get(apiURL + "/services/forwarder/all")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var list []struct{ Local, Remote, Protocol string }
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil {
		return nil, err
	}
	all := []string{}
	for _, f := range list {
		all = append(all, f.Protocol+" "+f.Local+" "+f.Remote)
	}
	slices.Sort(all)
	return all, nil
}

func (n *virtualNetwork) wantForwards(want ...string) {
	n.t.Helper()
	slices.Sort(want)
	wait.Until(n.t, fmt.Sprintf("gvproxy has %q", want), func() error {
		got, err := n.forwards()
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("it has %q", got)
		}
		return err
	})
}

// answers checks that an echo server answers on the host.
func (n *virtualNetwork) answers(network, addr string) {
	n.t.Helper()
	wait.Until(n.t, network+" "+addr+" answers on the host", func() error {
		c, err := n.outside.Dial(network, addr)
		if err != nil {
			return err
		}
		defer c.Close()
		return roundTrip(c, "hello over "+network)
	})
}

func (n *virtualNetwork) refuses(addr string) {
	n.t.Helper()
	wait.Until(n.t, addr+" is closed on the host", func() error { return probe.WantClosed(n.outside.dialer(addr)) })
}

// agentRig is an agent in the guest whose only sink is gvproxy.
func (n *virtualNetwork) agentRig(flags ...string) *rig {
	r := &rig{
		t: n.t, guest: n.guest, outside: n.outside, dir: n.dir, link: "unix://" + filepath.Join(n.dir, "link", "s"),
		agentCtl:   filepath.Join(n.dir, "actl", "s"),
		agentFlags: append([]string{"--sink", "gvproxy=" + apiURL, "--source", "socket,nat"}, flags...),
	}
	r.startAgent()
	return r
}

func TestGvproxyCarriesTCPAndUDP(t *testing.T) {
	n := newVirtualNetwork(t)
	c := container(t, n.guest)
	go echo.Serve(c.listen(t, "tcp4", "0.0.0.0:80"))
	n.guest.sh(t, `nft -f - <<'END'
table ip fl {
	chain pre { type nat hook prerouting priority -100; fib daddr type local tcp dport 8083 dnat to 10.88.0.2:80; }
	chain out { type nat hook output priority -100; fib daddr type local tcp dport 8087 dnat to 10.88.0.2:80; }
}
END`)
	tcp := n.guest.listen(t, "tcp4", "0.0.0.0:8080")
	go echo.Serve(tcp)
	udp := n.guest.listenPacket(t, "udp4", "0.0.0.0:8081")
	go echo.ServePackets(udp)
	go echo.Serve(n.guest.listen(t, "tcp", "[::]:8082"))
	r := n.agentRig()
	for _, k := range []string{"tcp 0.0.0.0:8080", "udp 0.0.0.0:8081", "tcp [::]:8082", "tcp 0.0.0.0:8083", "tcp 0.0.0.0:8087"} {
		r.wantState(k, "active")
	}
	n.answers("tcp", "127.0.0.1:8080")
	n.answers("udp", "127.0.0.1:8081")
	n.answers("tcp", "127.0.0.1:8082")
	n.answers("tcp", "[::1]:8082")
	n.answers("tcp", "127.0.0.1:8083")
	n.answers("tcp", "127.0.0.1:8087") // a rule for the guest's own programs alone

	if err := errors.Join(tcp.Close(), udp.Close()); err != nil {
		t.Fatal(err)
	}
	r.wantState("tcp 0.0.0.0:8080", "")
	n.refuses("127.0.0.1:8080")
	r.wantState("udp 0.0.0.0:8081", "")
	r.eventually("the UDP port is free again", func() error {
		l, err := n.outside.ListenPacket("udp4", "127.0.0.1:8081")
		if err == nil {
			err = l.Close()
		}
		return err
	})
	if code := r.agent.Stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	n.wantForwards(sshForward) // which is not ours
}

func TestGvproxyConflictWithHostProgram(t *testing.T) {
	n := newVirtualNetwork(t)
	l := n.outside.listen(t, "tcp4", "127.0.0.1:8080")
	go echo.Serve(n.guest.listen(t, "tcp4", "0.0.0.0:8080"))
	r := n.agentRig()
	r.wantState("tcp 0.0.0.0:8080", "conflict")
	if _, p := r.state("tcp 0.0.0.0:8080"); !strings.Contains(p.Reason, "another program of the host holds 127.0.0.1:8080") {
		t.Errorf("reason = %q", p.Reason)
	}
	_ = l.Close()
	r.wantState("tcp 0.0.0.0:8080", "active")
	n.answers("tcp", "127.0.0.1:8080")
}

// The incumbent does not send its ports again to a peer that restarted.
func TestGvproxyRestartIsResynced(t *testing.T) {
	n := newVirtualNetwork(t)
	go echo.Serve(n.guest.listen(t, "tcp4", "0.0.0.0:8080"))
	r := n.agentRig()
	r.wantState("tcp 0.0.0.0:8080", "active")
	for range 3 {
		n.proxy.Kill()
		n.refuses("127.0.0.1:8080")
		n.startProxy()
		n.awaitAPI()
		back := time.Now()
		n.answers("tcp", "127.0.0.1:8080")
		t.Logf("served again %v after gvproxy answered the guest", time.Since(back).Round(time.Millisecond))
		r.wantState("tcp 0.0.0.0:8080", "active")
	}
}

func TestGvproxyForwardsSurviveAgentKill(t *testing.T) {
	n := newVirtualNetwork(t)
	stays := n.guest.listen(t, "tcp4", "0.0.0.0:8080")
	go echo.Serve(stays)
	goes := n.guest.listen(t, "tcp4", "0.0.0.0:9090")
	r := n.agentRig()
	r.wantState("tcp 0.0.0.0:8080", "active")
	r.wantState("tcp 0.0.0.0:9090", "active")
	r.agent.Kill()
	_ = goes.Close()
	r.startAgent()
	r.wantState("tcp 0.0.0.0:8080", "active")
	n.wantForwards(sshForward, "tcp 127.0.0.1:8080 192.168.127.2:8080")
	n.answers("tcp", "127.0.0.1:8080")
}

// The incumbent reaches the guest's loopback by NAT rules, which open it to containers
// too.
func TestGvproxyLoopbackServerIsHostOnly(t *testing.T) {
	n := newVirtualNetwork(t)
	c := container(t, n.guest)
	go echo.Serve(n.guest.listen(t, "tcp4", "127.0.0.1:8084"))
	go echo.Serve(n.guest.listen(t, "tcp6", "[::1]:8085"))
	go echo.ServePackets(n.guest.listenPacket(t, "udp4", "127.0.0.1:8086"))
	r := n.agentRig("--bridge-loopback")
	r.wantState("tcp 127.0.0.1:8084", "active")
	r.wantState("udp 127.0.0.1:8086", "active")
	r.wantState("tcp [::1]:8085", "active")
	n.answers("tcp", "127.0.0.1:8084")
	n.answers("tcp", "[::1]:8085")
	n.answers("udp", "127.0.0.1:8086")
	var forwards []string
	r.eventually("the list of forwards", func() (err error) { forwards, err = n.forwards(); return err })
	for _, f := range forwards {
		if f == sshForward || strings.HasPrefix(f, "udp") {
			continue
		}
		at := strings.Fields(f)[2]
		if err := probe.Want(probe.Reset, c.dialer(at), "from a container"); err != nil {
			t.Errorf("%s, from a container: %v", at, err)
		}
	}
	l, err := r.list()
	if err != nil {
		t.Fatal(err)
	}
	if len(l.Publications) != 3 {
		t.Errorf("publications: %+v", l.Publications) // the bridges are none
	}
}
