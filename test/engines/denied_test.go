// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
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
			if c, err := p.outside.Dial("tcp", addr); err == nil {
				b.open.Add(1)
				_ = c.Close()
			}
		}
	}()
	return b
}

func (b *prober) end() { close(b.stop); <-b.done }

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
	config := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(config, []byte("rules:\n  - match: {name: \"secret*\"}\n    action: deny\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := startPeers(t, "--config", config, "--source", "socket,nat,docker", "--docker-host", "unix://"+dockerSocket)
	d := dockerd(t)
	dockerImage(t)
	serve := []string{"bb", "httpd", "-f", "-p", "8200", "-h", "/etc"}
	drun(t, append([]string{"--name", "web", "-p", "8201:8200"}, serve...)...)
	p.reach("tcp [::]:8201", "HTTP/1.") // what no rule denies is open

	b := p.probe("127.0.0.1:8200")
	defer func() {
		b.end()
		t.Logf("%d of %d connections were accepted", b.open.Load(), b.tried.Load())
	}()
	check := func(when string) {
		t.Helper()
		if n := b.open.Swap(0); n > 0 {
			t.Errorf("%s: %d connections to a denied container were accepted", when, n)
		}
	}
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
