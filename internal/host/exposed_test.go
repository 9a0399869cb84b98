// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/test/kit/ports"
)

// exposing is a policy whose run-time rule opens all ports to other machines, with a rule
// of the configuration about conflicts.
func exposing(t *testing.T, c port.OnConflict) Policy {
	t.Helper()
	set, err := policy(t, rules.Asked(), rules.Rule{OnConflict: c}).(*rules.Set).
		WithRuntime([]rules.Rule{{HostAddress: rules.All(), Until: time.Now().Add(time.Hour)}})
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
