// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/probe"
)

// deniedConnects is how many connections are tried to denied containers, at least.
const deniedConnects = 2000

// prober connects to a port of the host all the time.
type prober struct {
	tried, open atomic.Int64
	stop        chan struct{}
	done        chan struct{}
}

func (p *peers) probe(addr string) *prober {
	b := &prober{stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(b.done)
		for {
			select {
			case <-b.stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			b.tried.Add(1)
			// A reset was a connection as well; what else fails shows nothing.
			open, _ := probe.Listens(func() (net.Conn, error) { return p.outside.Dial("tcp", addr) })
			if open {
				b.open.Add(1)
			}
		}
	}()
	return b
}

func (b *prober) end(t *testing.T) {
	close(b.stop)
	<-b.done
	t.Logf("%d connections were tried", b.tried.Load())
}

// closed checks that no connection was accepted since the last time.
func (b *prober) closed(t *testing.T, when string) {
	t.Helper()
	if n := b.open.Swap(0); n > 0 {
		t.Errorf("%s: %d connections to a denied container were accepted", when, n)
	}
}

// denySecrets returns a configuration with a rule that denies by name.
func denySecrets(t *testing.T) (config string) {
	t.Helper()
	config = filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(config, []byte("rules:\n  - match: {name: \"secret*\"}\n    action: deny\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return config
}

// state waits until a publication has a state.
func (p *peers) state(key string, s port.State) {
	p.t.Helper()
	eventually(p.t, func() error {
		l, err := p.list()
		if err != nil {
			return err
		}
		for _, pub := range l.Publications {
			if is(pub, key) && pub.State == s {
				return nil
			}
		}
		return fmt.Errorf("%s is not %s: %+v", key, s, l.Publications)
	})
}

// A container that a rule denies by its name is never open on the host: not while it
// starts, restarts or goes, and not while an agent starts beside an engine that hangs.
func TestDeniedContainerIsNeverOpen(t *testing.T) {
	p := startPeers(t, "--config", denySecrets(t), "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket)
	d := dockerd(t)
	dockerImage(t)
	serve := []string{"bb", "httpd", "-f", "-p", "8200", "-h", "/etc"}
	drun(t, append([]string{"--name", "web", "-p", "8201:8200"}, serve...)...)
	p.reach("tcp [::]:8201", "HTTP/1.") // what no rule denies is open

	b := p.probe("127.0.0.1:8200")
	defer b.end(t)
	check := func(when string) { t.Helper(); b.closed(t, when) }
	for round := 0; round < 5 || b.tried.Load() < deniedConnects; round++ {
		network := []string{"-p", "8200:8200"}
		if round%3 == 2 {
			network = []string{"--network", "host"}
		}
		drun(t, append(append([]string{"--name", "secret0"}, network...), serve...)...)
		time.Sleep(500 * time.Millisecond)
		check("start")
		run(t, "docker", "restart", "-t", "0", "secret0")
		time.Sleep(500 * time.Millisecond)
		check("restart")
		if round == 1 {
			// An agent that starts beside an engine that hangs knows no owners.
			if err := syscall.Kill(d.cmd.Process.Pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			p.agent.stop(syscall.SIGKILL)
			p.agent.run(t)
			p.state("tcp 0.0.0.0:8200", port.Pending)
			time.Sleep(5 * time.Second)
			check("beside an engine that hangs")
			if err := syscall.Kill(d.cmd.Process.Pid, syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			p.state("tcp [::]:8200", port.Denied)
			check("beside an engine that is back")
		}
		run(t, "docker", "rm", "-f", "secret0")
		check("removal")
	}
	p.reach("tcp [::]:8201", "HTTP/1.")
}

// nerdctl leaves the NAT rule of a container that stops, and the next one gets the
// same address.
func TestDeniedContainerOfNerdctlIsNeverOpen(t *testing.T) {
	startContainerd(t)
	containerdImage(t)
	p := startPeers(t, "--config", denySecrets(t), "--source", "socket,nat,containerd", "--containerd-socket", containerdSocket)
	serve := []string{"bb", "httpd", "-f", "-p", "80", "-h", "/etc"}
	must(t, append([]string{"run", "-d", "--name", "web", "-p", "8201:80"}, serve...)...)
	p.reach("tcp 0.0.0.0:8201", "HTTP/1.")

	b := p.probe("127.0.0.1:8200")
	defer b.end(t)
	for range 4 {
		must(t, append([]string{"run", "-d", "--name", "secret0", "-p", "8200:80"}, serve...)...)
		time.Sleep(500 * time.Millisecond)
		b.closed(t, "start")
		must(t, "restart", "secret0")
		b.closed(t, "restart")
		must(t, "stop", "secret0")
		time.Sleep(time.Second)
		b.closed(t, "stop")
		must(t, "start", "secret0")
		time.Sleep(500 * time.Millisecond)
		b.closed(t, "start again")
		must(t, "rm", "-f", "secret0")
		b.closed(t, "removal")
	}
	// A port that no rule denies goes with its container, too.
	must(t, "stop", "web")
	p.withheld("tcp 0.0.0.0:8201", "left behind by container web, stopped")
	must(t, "start", "web")
	p.reach("tcp 0.0.0.0:8201", "HTTP/1.")
}

// withheld waits until a publication is denied for that reason, or gone.
func (p *peers) withheld(key, reason string) {
	p.t.Helper()
	eventually(p.t, func() error {
		l, err := p.list()
		if err != nil {
			return err
		}
		for _, pub := range l.Publications {
			if is(pub, key) && (pub.State != port.Denied || pub.Reason != reason) {
				return fmt.Errorf("%s is %s: %s", key, pub.State, pub.Reason)
			}
		}
		return nil
	})
}
