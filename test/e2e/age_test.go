// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/status"
)

// TestAgeOutlivesTheAgent: a port keeps its age when the agent is restarted; one that was
// opened again meanwhile does not; after a kill ages are lower bounds; and a file that is
// damaged costs one line of log.
func TestAgeOutlivesTheAgent(t *testing.T) {
	const kept, again = "tcp 0.0.0.0:7000", "tcp 0.0.0.0:7001"
	r := newRig(t)
	file := filepath.Join(filepath.Dir(r.agentCtl), "open-since-s.json")
	opened := func(key string) status.Publication {
		t.Helper()
		r.wantState(key, "active")
		_, p := r.state(key)
		return p
	}
	_ = r.guest.listen(t, "tcp4", "0.0.0.0:7002") // before any agent
	r.start()
	_ = r.guest.listen(t, "tcp4", "0.0.0.0:7000")
	l := r.guest.listen(t, "tcp4", "0.0.0.0:7001")
	first := opened(kept)
	if p := opened("tcp 0.0.0.0:7002"); first.SinceAtLeast || opened(again).SinceAtLeast || !p.SinceAtLeast {
		t.Errorf("lower bounds: %v, %v, want none; %v, want one", first.SinceAtLeast, opened(again).SinceAtLeast, p.SinceAtLeast)
	}

	if code := r.agent.Stop(syscall.SIGTERM); code != 0 {
		t.Fatal("exit code", code)
	}
	_ = l.Close()
	_ = r.guest.listen(t, "tcp4", "0.0.0.0:7001")
	r.startAgent()
	// The clocks that tell the age are read one after the other.
	if p := opened(kept); p.SinceAtLeast || p.Since.Sub(first.Since).Abs().Seconds() > 1 {
		t.Errorf("restarted: since %v, at least: %v; before %v", p.Since, p.SinceAtLeast, first.Since)
	}
	if p := opened(again); !p.SinceAtLeast || !p.Since.After(first.Since) {
		t.Errorf("opened again: since %v, at least: %v; before %v", p.Since, p.SinceAtLeast, first.Since)
	}
	if out, _, _ := fairlead(t, "ls", "--no-headers", "--control", r.agentCtl, "--filter", "port=7001"); !strings.Contains(out, ">") {
		t.Errorf("ls does not say that the age is a lower bound:\n%s", out)
	}

	r.agent.Kill()
	r.startAgent()
	if p := opened(kept); !p.SinceAtLeast || p.Since.Sub(first.Since).Abs().Seconds() > 1 {
		t.Errorf("killed: since %v, at least: %v; before %v", p.Since, p.SinceAtLeast, first.Since)
	}

	r.agent.Stop(syscall.SIGTERM)
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.startAgent()
	if p := opened(kept); !p.SinceAtLeast || !p.Since.After(first.Since) {
		t.Errorf("damaged: since %v, at least: %v; before %v", p.Since, p.SinceAtLeast, first.Since)
	}
	if n := strings.Count(r.agent.Output(), "open-since"); n != 1 {
		t.Errorf("%d lines about the file:\n%s", n, r.agent.Output())
	}
}
