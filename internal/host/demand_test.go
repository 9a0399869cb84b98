// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/wire"
)

// demanding is a session with an agent that takes forwards by name.
type demanding struct{ link.Session }

func (s demanding) Peer() link.Peer {
	p := s.Session.Peer()
	p.Demand = true
	return p
}

// asking is a policy with run-time rules for these ports of all guests.
func asking(t *testing.T, demands ...string) *rules.Set {
	t.Helper()
	var list []rules.Rule
	for _, text := range demands {
		d, err := port.ParseDemand(text)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, rules.Rule{Match: rules.Match{Protocol: d.Protocol, Ports: []rules.PortRange{{First: d.Port, Last: d.Port}}, Demand: d}})
	}
	s, err := rules.Empty(rules.Asked()).WithRuntime(list)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A guest is told what is asked for at the start of a session and when that changes, and says
// why it waits.
func TestDemandsOfAGuest(t *testing.T) {
	a := newAgent(t, "vm")
	a.begins(snapshot(1))
	dial := func(ctx context.Context) (link.Session, error) {
		s, err := a.connect(ctx)
		if err == nil {
			s = demanding{s}
		}
		return s, err
	}
	h, _ := startGuests(t, Options{Guests: []Guest{{Name: "vm", Dial: dial}}, Policy: asking(t, "web:80")})
	web := asking(t, "web:80").Demands("")[0]
	if got := fmt.Sprint((<-a.demands).Ports); got != "[web:80/tcp]" {
		t.Error(got)
	}
	if why := h.DemandReason("", web); why != "" {
		t.Errorf("before the answer: %q", why)
	}
	a.say(wire.Control{Demanded: &wire.Demanded{Waiting: wire.List[wire.Waiting]{{Port: "web:80/tcp", Reason: "no container"}}}})
	eventually(t, "the reason is known", func() bool { return h.DemandReason("v*", web) == "no container" })
	h.SetPolicy(asking(t, "web:80", "db:1"))
	if got := fmt.Sprint((<-a.demands).Ports); got != "[web:80/tcp db:1/tcp]" {
		t.Error(got)
	}
	h.SetPolicy(asking(t))
	if got := fmt.Sprint((<-a.demands).Ports); got != "[]" {
		t.Error(got)
	}
	if why := h.DemandReason("other", web); !strings.Contains(why, `no guest is called "other": want one of "vm"`) {
		t.Error(why)
	}
}

func TestDemandsOfAGuestThatTakesNone(t *testing.T) {
	a := newAgent(t, "vm")
	a.begins(snapshot(1))
	h, _ := start(t, Options{Policy: asking(t, "web:80")}, a)
	eventually(t, "the guest is connected", func() bool { return h.Guests()[0].Connected })
	if why := h.DemandReason("", asking(t, "web:80").Demands("")[0]); !strings.Contains(why, "set hostForwards: true") {
		t.Error(why)
	}
	select {
	case m := <-a.demands:
		t.Errorf("%+v was sent", m)
	default:
	}
}
