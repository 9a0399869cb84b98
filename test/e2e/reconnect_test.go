// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// equal waits until agent and host show the same set, and all of it settled.
func (r *rig) equal() {
	r.t.Helper()
	r.eventually("agent and host show the same", func() error {
		a, err := r.list()
		if err != nil {
			return err
		}
		h, err := listAt(r.hostCtl)
		if err != nil {
			return err
		}
		wanted, held := allowed(a), allowed(h)
		if !slices.Equal(wanted, held) {
			return fmt.Errorf("agent: %q\nhost: %q", wanted, held)
		}
		return nil
	})
}

func allowed(l status.List) (keys []string) {
	for _, p := range l.Publications {
		if p.State.String() != "denied" {
			keys = append(keys, p.Key.String()+" "+p.State.String())
		}
	}
	slices.Sort(keys)
	return keys
}

// fds returns the number of descriptors that a process has open.
func fds(p *process) (n int, err error) {
	dir := filepath.Join("/proc", fmt.Sprint(p.PID()), "fd")
	names, err := os.ReadDir(dir)
	for _, f := range names {
		// By these an agent learns that the owner of a socket ends: one for each process.
		if to, _ := os.Readlink(filepath.Join(dir, f.Name())); !strings.Contains(to, "[pidfd]") && !strings.HasPrefix(to, "pidfd:") {
			n++
		}
	}
	return n, err
}

func TestReconnect(t *testing.T) {
	r := newRig(t, "--log-level", "debug").start()
	go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:7000"))
	c := startChurn(t, r.guest, 1, 2, 20000, 4*time.Millisecond)
	n := rounds.Of(t, "FAIRLEAD_LINK_LOSSES", 50)
	var agentFDs, hostFDs int
	for i := range n {
		switch i % 2 {
		case 0:
			r.host.Kill()
			r.startHost()
		case 1:
			r.agent.Kill()
			r.startAgent()
		}
		flow := echoThrough(t, r, "127.0.0.1:7000")
		c.passes(t, 10) // a flow that is wanted is not reset by other changes
		if err := roundTrip(flow, "still there"); err != nil {
			t.Fatalf("round %d: the flow broke: %v", i, err)
		}
		_ = flow.Close()
		if i == 3 {
			agentFDs, hostFDs = settledFDs(t, r, c)
			c = startChurn(t, r.guest, 2, 2, 20000, 4*time.Millisecond)
		}
	}
	c.close()
	r.agree()
	r.equal()
	if n < 4 {
		return
	}
	r.eventually("no descriptor is left behind", func() error {
		a, err := fds(r.agent)
		if err != nil {
			return err
		}
		h, err := fds(r.host)
		if err != nil {
			return err
		}
		if a > agentFDs+2 || h > hostFDs+2 {
			return fmt.Errorf("agent %d descriptors, was %d; host %d, was %d", a, agentFDs, h, hostFDs)
		}
		return nil
	})
}

// settledFDs ends the churn and returns how many descriptors both sides then have.
func settledFDs(t *testing.T, r *rig, c *churn) (agent, host int) {
	t.Helper()
	c.close()
	r.agree()
	r.equal()
	r.eventually("the number of descriptors settles", func() error {
		a, err1 := fds(r.agent)
		h, err2 := fds(r.host)
		err := errors.Join(err1, err2)
		if err == nil && (a != agent || h != host) {
			err = fmt.Errorf("agent %d, was %d; host %d, was %d", a, agent, h, host)
		}
		agent, host = a, h
		return err
	})
	return agent, host
}

// The host keeps ports open while the agent restarts again and again.
func TestListenerSurvivesAgentRestart(t *testing.T) {
	r := newRig(t)
	r.hostFlags = []string{"--grace", "1h"} // an agent may take its time to start
	r.start()
	go echo.Serve(r.guest.listen(t, "tcp4", "0.0.0.0:7000"))
	r.wantState("tcp 0.0.0.0:7000", "active")
	for range 5 {
		r.agent.Kill()
		// The link is down, the port is still open.
		dialled := time.Now()
		conn, err := r.outside.Dial("tcp", "127.0.0.1:7000")
		if errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatal("the host closed a port whose guest is away for a moment:", err)
		}
		r.startAgent()
		// The host held the connection and serves it now. It holds for 3 s, which
		// can be too short for an agent that starts on a loaded machine.
		if err == nil {
			err = roundTrip(conn, "late")
			_ = conn.Close()
		}
		if err != nil && time.Since(dialled) < 3*time.Second {
			t.Error("a connection made while the link was down:", err)
		}
		_ = echoThrough(t, r, "127.0.0.1:7000").Close()
	}
}

func TestGracefulEnd(t *testing.T) {
	r := newRig(t).start()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		if code := r.agent.Stop(sig); code != 0 {
			t.Errorf("agent: exit code %d after %v", code, sig)
		}
		if code := r.host.Stop(sig); code != 0 {
			t.Errorf("host: exit code %d after %v", code, sig)
		}
		for _, path := range []string{r.agentCtl, r.hostCtl, r.link[len("unix://"):]} {
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is still there after %v", filepath.Base(filepath.Dir(path)), sig)
			}
		}
		r.start()
	}
}
