// SPDX-License-Identifier: Apache-2.0

package host

import (
	"testing"

	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// closeOf returns the close of the next flow that a trace shows.
func closeOf(t *testing.T, sub *trace.Subscription) trace.Event {
	t.Helper()
	for {
		if e := wait.For(t, "end of a flow", sub.C()); e.Event == trace.Close {
			return e
		}
	}
}

func TestTrace(t *testing.T) {
	a := newAgent(t, "vm")
	served, dead, udp := key(port.TCP, any4, ports.Free(t)), key(port.TCP, any4, ports.Free(t)), key(port.UDP, any4, ports.Free(t))
	a.greeter(served, "hello")
	a.serve(dead) // known, and nothing serves it
	a.echo(udp, "")
	// The last one has another port on the host.
	a.begins(snapshot(1, pub(served), pub(dead), pub(udp, at(lo4, ports.Free(t)))))
	hub := new(trace.Hub)
	_, stop := start(t, Options{Trace: hub}, a)
	a.wants(served, port.Active)
	a.wants(dead, port.Active)
	onHost := a.wants(udp, port.Active).HostAddress
	of := func(p uint16) *trace.Subscription {
		sub := hub.Subscribe(trace.Filter{Port: p})
		t.Cleanup(sub.Close)
		return sub
	}
	sub := of(served.Port)
	if got := greeting(t, at(lo4, served.Port)); got != "hello" {
		t.Fatalf("greeting %q", got)
	}
	if e := closeOf(t, sub); e.ToHost != 5 || e.ToGuest != 0 || e.Guest != "vm" || e.Reason != "closed by both sides" || !e.Peer.IsValid() {
		t.Errorf("%+v", e)
	}
	sub = of(dead.Port)
	if !wasReset(t, at(lo4, dead.Port)) {
		t.Error("not reset")
	}
	if e := closeOf(t, sub); e.Reason == "closed by both sides" || e.ToHost != 0 {
		t.Errorf("%+v", e)
	}
	sub = of(onHost.Port())
	if got := question(t, dialUDP(t, onHost), "query"); got != "query" {
		t.Fatalf("answer %q", got)
	}
	stop()
	if e := closeOf(t, sub); e.ToGuest < 5 || e.ToHost < 5 || e.Port != udp.Port {
		t.Errorf("%+v", e)
	}
}
