// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// exposing is a policy whose run-time rule opens all ports to other machines, with a rule
// of the configuration about conflicts.
func exposing(t *testing.T, c port.OnConflict) Policy {
	t.Helper()
	set, err := policy(t, rules.Asked(), rules.Rule{OnConflict: c}).(*rules.Set).
		WithRuntime([]rules.Rule{{Kind: port.RuleExpose, HostAddress: rules.All(), Until: time.Now().Add(time.Hour)}})
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// Connections of other machines end with the exposure, also if the guest withdrew the
// publication before; those of this machine do not.
func TestExposedFlowsOfWithdrawnPublicationEnd(t *testing.T) {
	k := key(port.TCP, any4, ports.Free(t))
	a := newAgent(t, "vm")
	a.begins(snapshot(1, pub(k, at(lo4, k.Port))))
	h, _ := start(t, Options{Policy: exposing(t, port.OnConflictUnset)}, a)
	eventually(t, "the port is open to other machines", func() bool {
		p, ok := h.View().Get(ID{"vm", k})
		return ok && !p.Exposed.IsZero() && p.State() == port.Active
	})
	flows := h.guests[0].flows
	far, f := flows.Begin(t.Context(), k)
	defer f.End()
	f.Outside(true)
	asked, f := flows.Begin(t.Context(), k) // to an address that the guest asked for
	defer f.End()
	f.Outside(false)
	near, f := flows.Begin(t.Context(), k)
	defer f.End()

	a.say(removed(1, k))
	eventually(t, "the port is withdrawn", func() bool { return h.View().Len() == 0 })
	if far.Err() != nil {
		t.Fatal("the connection ended before the exposure did")
	}
	h.SetPolicy(policy(t, rules.Asked()))
	eventually(t, "the connection of another machine is reset", func() bool { return errors.Is(context.Cause(far), errHidden) })
	if near.Err() != nil || asked.Err() != nil {
		t.Error("a connection was reset that the exposure did not let in")
	}
}

// Where the wildcard of an exposed port cannot be opened, the port remains on the loopback,
// and does not move away from there.
func TestExposedPortStaysOnLoopback(t *testing.T) {
	for _, c := range []port.OnConflict{port.OnConflictWait, port.OnConflictNext} {
		t.Run(c.String(), func(t *testing.T) {
			k := key(port.TCP, any4, ports.Free(t))
			other := at(netip.MustParseAddr("127.0.0.2"), k.Port) // of another program; in place of an address of the network
			ln, err := net.Listen("tcp4", other.String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = ln.Close() })
			a := newAgent(t, "vm")
			a.greeter(k, "hello")
			a.begins(snapshot(1, pub(k, at(lo4, k.Port))))
			h, _ := start(t, Options{Policy: policy(t, rules.Asked(), rules.Rule{OnConflict: c})}, a)
			a.wants(k, port.Active)
			h.SetPolicy(exposing(t, c))
			eventually(t, "the wildcard has a conflict and the loopback is open", func() bool {
				states := make(map[string]port.State)
				for _, o := range a.heard(k) {
					states[o.HostAddress.String()] = o.State
				}
				return len(states) == 2 && states[at(any4, k.Port).String()] == port.Conflict && states[at(lo4, k.Port).String()] == port.Active
			})
			if got := greeting(t, at(lo4, k.Port)); got != "hello" {
				t.Errorf("the loopback is served by %q", got)
			}
			_ = ln.Close()
			h.SetPolicy(policy(t, rules.Asked(), rules.Rule{OnConflict: c}))
			eventually(t, "the port is on the loopback alone", func() bool {
				o := a.heard(k)
				return len(o) == 1 && o[0].State == port.Active && o[0].HostAddress == at(lo4, k.Port)
			})
		})
	}
}

func TestExposedPortIsOpenEverywhere(t *testing.T) {
	k := key(port.TCP, any4, ports.Free(t))
	a := newAgent(t, "vm")
	a.greeter(k, "hello")
	a.begins(snapshot(1, pub(k, at(lo4, k.Port))))
	h, _ := start(t, Options{Policy: exposing(t, port.OnConflictUnset)}, a)
	other := at(netip.MustParseAddr("127.0.0.2"), k.Port)
	eventually(t, "another address is open", func() bool { return !refused(t, other) })
	for _, to := range []string{"127.0.0.1", "127.0.0.2"} {
		if got := greeting(t, at(netip.MustParseAddr(to), k.Port)); got != "hello" {
			t.Errorf("%s is served by %q", to, got)
		}
	}
	h.SetPolicy(policy(t, rules.Asked()))
	eventually(t, "only the loopback is open", func() bool { return refused(t, other) && !refused(t, at(lo4, k.Port)) })
}
