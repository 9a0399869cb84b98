// SPDX-License-Identifier: Apache-2.0

package link

import (
	"errors"
	"io"
	"strings"
	"testing"
)

// withRuns lets the agent open streams.
func withRuns(n int) func(_, host *Options) { return func(_, host *Options) { host.Runs = n } }

// run opens a stream from the agent and accepts it on the host.
func run(t *testing.T, agent, host Session) (a, h Stream) {
	t.Helper()
	a, err := agent.Open(ctx10(t))
	if err == nil {
		_, err = a.Write([]byte("x"))
	}
	if err != nil {
		t.Fatal(err)
	}
	h, err = host.Accept(ctx10(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(h, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return a, h
}

// The agent opens streams only to a host that says that it takes them, and no more than it takes.
func TestAgentOpensRuns(t *testing.T) {
	agent, host := sessions(t, withRuns(2))
	if !agent.Peer().Runs || host.Peer().Runs {
		t.Errorf("runs: the agent knows %v, the host %v", agent.Peer().Runs, host.Peer().Runs)
	}
	for range 2 {
		a, h := run(t, agent, host)
		echoed(t, a, h)
		echoed(t, h, a)
	}
	st, err := agent.Open(ctx10(t))
	if err == nil {
		_, err = st.Read(make([]byte, 1))
	}
	if !errors.Is(err, ErrReset) {
		t.Errorf("one stream too many: %v", err)
	}
	told(t, host, agent)
	g, h := flow(t, agent, host)
	echoed(t, h, g)
}

// A host that takes no runs is not sent any.
func TestNoRunsForAHostThatTakesNone(t *testing.T) {
	agent, host := sessions(t)
	if _, err := agent.Open(ctx10(t)); err == nil || !strings.Contains(err.Error(), "runs no programs") {
		t.Errorf("the agent opened a stream: %v", err)
	}
	if _, err := host.Accept(ctx10(t)); err == nil || !strings.Contains(err.Error(), "runs no programs") {
		t.Errorf("the host accepts streams: %v", err)
	}
	g, h := flow(t, agent, host)
	echoed(t, h, g)
}

// An agent's word that it is a host that runs programs counts for nothing.
func TestAgentIsNoHost(t *testing.T) {
	_, host := sessions(t, func(agent, _ *Options) { agent.Runs = 3 })
	if host.Peer().Runs {
		t.Error("the host takes an agent for a host that runs programs")
	}
}

// What is not read on one stream holds up no other.
func TestUnreadRunHoldsUpNothing(t *testing.T) {
	agent, host := sessions(t, withRuns(1))
	a, h := run(t, agent, host)
	done := make(chan error, 1)
	go func() {
		_, err := h.Write(make([]byte, 10<<20))
		done <- err
	}()
	for range 20 {
		f, g := flow(t, agent, host)
		echoed(t, g, f)
		_, _ = f.Close(), g.Close()
	}
	select {
	case err := <-done:
		t.Fatalf("10 MiB were taken that nobody read (%v)", err)
	default:
	}
	_ = a.Reset()
	if err := <-done; !errors.Is(err, ErrReset) {
		t.Errorf("the writer ended with %v", err)
	}
	told(t, host, agent)
}
