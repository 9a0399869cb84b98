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
	"github.com/fairlead/fairlead/internal/testkit/probe"
)

// deniedConnects is how many connections are tried in each row, at least. There are four.
const deniedConnects = 600

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

func (b *prober) end() {
	close(b.stop)
	<-b.done
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

// deniedRow is one way in which a denied container starts, restarts and goes.
type deniedRow struct {
	name  string
	round func(t *testing.T, check func(when string))
}

// runDenied runs a row, for some rounds and until some connections were tried, and
// prints how many were.
func runDenied(t *testing.T, p *peers, row deniedRow, rounds int, connects int64) {
	t.Run(row.name, func(t *testing.T) {
		b := p.probe("127.0.0.1:8200")
		opened := int64(0)
		for round := 0; round < rounds || b.tried.Load() < connects; round++ {
			row.round(t, func(when string) {
				t.Helper()
				opened += b.open.Load()
				b.closed(t, when)
			})
		}
		b.end()
		t.Logf("%s: %d of %d connections to a denied container were accepted", row.name, opened+b.open.Load(), b.tried.Load())
		b.closed(t, "the end")
	})
}

var deniedServer = []string{"bb", "httpd", "-f", "-p", "8200", "-h", "/etc"}

// deniedByDocker returns the rows of Docker.
func deniedByDocker(p *peers, d *daemon) []deniedRow {
	lifecycle := func(network ...string) func(*testing.T, func(string)) {
		return func(t *testing.T, check func(string)) {
			drun(t, append(append([]string{"--name", "secret0"}, network...), deniedServer...)...)
			time.Sleep(500 * time.Millisecond)
			check("start")
			run(t, "docker", "restart", "-t", "0", "secret0")
			time.Sleep(500 * time.Millisecond)
			check("restart")
			run(t, "docker", "rm", "-f", "secret0")
			check("removal")
		}
	}
	return []deniedRow{
		{"Docker", lifecycle("-p", "8200:8200")},
		{"host network", lifecycle("--network", "host")},
		{"hung engine", func(t *testing.T, check func(string)) {
			drun(t, append([]string{"--name", "secret0", "-p", "8200:8200"}, deniedServer...)...)
			p.state("tcp [::]:8200", port.Denied)
			// An agent that starts beside an engine that hangs knows no owners.
			d.Signal(syscall.SIGSTOP)
			p.agent.Stop(syscall.SIGKILL)
			p.agent.run(t)
			p.state("tcp 0.0.0.0:8200", port.Pending)
			p.state("tcp 0.0.0.0:8201", port.Pending) // it may be denied as well
			time.Sleep(2 * time.Second)
			check("beside an engine that hangs")
			d.Signal(syscall.SIGCONT)
			p.state("tcp [::]:8200", port.Denied)
			p.reach("tcp [::]:8201", "HTTP/1.")
			check("beside an engine that is back")
			run(t, "docker", "rm", "-f", "secret0")
			check("removal")
		}},
	}
}

// deniedByNerdctl is the row of nerdctl, which leaves the NAT rule of a container that
// stops; the next one gets the same address.
func deniedByNerdctl() deniedRow {
	return deniedRow{"nerdctl", func(t *testing.T, check func(string)) {
		must(t, append([]string{"run", "-d", "--name", "secret0", "-p", "8200:8200"}, deniedServer...)...)
		time.Sleep(500 * time.Millisecond)
		check("start")
		must(t, "restart", "secret0")
		check("restart")
		must(t, "stop", "secret0")
		time.Sleep(time.Second)
		check("stop")
		must(t, "start", "secret0")
		time.Sleep(500 * time.Millisecond)
		check("start again")
		must(t, "rm", "-f", "secret0")
		check("removal")
	}}
}

func deniedDocker(t *testing.T, rounds int, connects int64) {
	p := startPeers(t, "--config", denySecrets(t), "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket)
	d := dockerd(t)
	dockerImage(t)
	drun(t, append([]string{"--name", "web", "-p", "8201:8200"}, deniedServer...)...)
	p.reach("tcp [::]:8201", "HTTP/1.") // what no rule denies is open
	for _, row := range deniedByDocker(p, d) {
		runDenied(t, p, row, rounds, connects)
	}
	p.reach("tcp [::]:8201", "HTTP/1.")
}

func deniedNerdctl(t *testing.T, rounds int, connects int64) {
	startContainerd(t)
	containerdImage(t)
	p := startPeers(t, "--config", denySecrets(t), "--source", "socket,nat,containerd", "--containerd-socket", containerdSocket)
	must(t, append([]string{"run", "-d", "--name", "web", "-p", "8201:8200"}, deniedServer...)...)
	p.reach("tcp 0.0.0.0:8201", "HTTP/1.")
	runDenied(t, p, deniedByNerdctl(), rounds, connects)

	// A port that no rule denies goes with its container, too.
	must(t, "stop", "web")
	p.withheld("tcp 0.0.0.0:8201", "left behind by container web, stopped")
	p.agent.Stop(syscall.SIGKILL)
	p.agent.run(t)
	p.withheld("tcp 0.0.0.0:8201", "left behind by container web, stopped") // also by an agent that starts later
	must(t, "start", "web")
	p.reach("tcp 0.0.0.0:8201", "HTTP/1.")
}

// A container that takes long to start is in no list, though its port is open: the engine may
// answer many of them meanwhile.
func TestDeniedContainerThatStartsSlowlyIsNeverOpen(t *testing.T) {
	proxy := filepath.Join(t.TempDir(), "proxy")
	//nolint:gosec // the engine executes it
	if err := os.WriteFile(proxy, []byte("#!/bin/sh\ncase \"$*\" in *' 8200 '*) sleep 6; esac\nexec docker-proxy \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	p := startPeers(t, "--config", denySecrets(t), "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket)
	dockerd(t, "--userland-proxy-path", proxy)
	dockerImage(t)
	b := p.probe("127.0.0.1:8200")
	defer b.end()
	drun(t, append([]string{"--name", "secret0", "-p", "8200:8200"}, deniedServer...)...)
	b.closed(t, "start")
	run(t, "docker", "restart", "-t", "0", "secret0")
	b.closed(t, "restart")
}

// A container that a rule denies by its name is never open on the host: not while it
// starts, restarts or goes, and not while an agent starts beside an engine that hangs.
func TestDeniedContainerIsNeverOpen(t *testing.T) { deniedDocker(t, 3, deniedConnects) }

func TestDeniedNerdctlContainerNeverOpens(t *testing.T) { deniedNerdctl(t, 3, deniedConnects) }

// The same, once: the name has it run with the other smoke tests.
func TestReachNothingDeniedOfDocker(t *testing.T) { deniedDocker(t, 1, 0) }

func TestReachNothingDeniedOfNerdctl(t *testing.T) { deniedNerdctl(t, 1, 0) }

// withheld waits until a publication is denied for that reason, or gone.
func (p *peers) withheld(key, reason string) {
	p.t.Helper()
	eventually(p.t, func() error {
		l, err := p.list()
		if err != nil {
			return err
		}
		if !l.Ready() {
			return fmt.Errorf("not all sources are ready: %+v", l.Sources)
		}
		for _, pub := range l.Publications {
			if is(pub, key) && (pub.State != port.Denied || pub.Reason != reason) {
				return fmt.Errorf("%s is %s: %s", key, pub.State, pub.Reason)
			}
		}
		return nil
	})
}
