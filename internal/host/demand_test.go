// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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

// demandingGuest is the guest of an agent that takes forwards by name.
func (a *agent) demandingGuest() Guest {
	return Guest{Name: a.name, Dial: func(ctx context.Context) (link.Session, error) {
		s, err := a.connect(ctx)
		if err == nil {
			s = demanding{s}
		}
		return s, err
	}}
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

// webByName is a publication that somebody asked for as web:80.
func webByName() wire.Publication {
	p := pub(key(port.TCP, netip.MustParseAddr("172.17.0.2"), 80))
	p.Source, p.Demands = port.SourceDemand, wire.List[string]{"web:80/tcp"}
	return p
}

// A guest is told what is asked for at the start of a session and when that changes, and says
// why it waits.
func TestDemandsOfAGuest(t *testing.T) {
	a := newAgent(t, "vm")
	a.begins(snapshot(1))
	h, _ := startGuests(t, Options{Guests: []Guest{a.demandingGuest()}, Policy: asking(t, "web:80")})
	web := asking(t, "web:80").Demands("")[0]
	if got := fmt.Sprint((<-a.demands).Ports); got != "[web:80/tcp]" {
		t.Error(got)
	}
	if why := h.DemandReason("", web); why != "" {
		t.Errorf("before the answer: %q", why)
	}
	a.say(wire.Control{Demanded: &wire.Demanded{Waiting: wire.List[wire.Waiting]{{Port: "web:80/tcp", Reason: "no container"}}}})
	eventually(t, "the reason is known", func() bool { return h.DemandReason("v*", web) == "no container" })
	waits(t, h, "vm web:80/tcp no container")
	h.SetPolicy(asking(t, "web:80", "db:1"))
	if got := fmt.Sprint((<-a.demands).Ports); got != "[web:80/tcp db:1/tcp]" {
		t.Error(got)
	}
	h.SetPolicy(asking(t))
	if got := fmt.Sprint((<-a.demands).Ports); got != "[]" {
		t.Error(got)
	}
	waits(t, h)
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
	} else {
		waits(t, h, "vm web:80/tcp "+why)
	}
	select {
	case m := <-a.demands:
		t.Errorf("%+v was sent", m)
	default:
	}
}

// What the guest publishes, as somebody asks for it there, does not wait: not for a guest that
// takes nothing from hosts, nor while it is away.
func TestDemandThatTheGuestAnswersItself(t *testing.T) {
	web, byName := asking(t, "web:80").Demands("")[0], webByName()
	a := newAgent(t, "vm")
	a.begins(snapshot(1, byName))
	h, _ := start(t, Options{Policy: asking(t, "web:80")}, a)
	eventually(t, "the guest is connected", func() bool { return h.Guests()[0].Connected })
	waits(t, h)
	a.say(wire.Control{Change: &wire.Change{Base: 1, Generation: 2, Removed: wire.List[port.Key]{byName.Key}}})
	eventually(t, "it waits again", func() bool { return h.DemandReason("", web) != "" })
	waits(t, h, "vm web:80/tcp "+h.DemandReason("", web))
	a.say(wire.Control{Change: &wire.Change{Base: 2, Generation: 3, Put: wire.List[wire.Publication]{byName}}})
	waits(t, h)
	a.drop(errors.New("gone"))
	eventually(t, "the guest is away", func() bool { return !h.Guests()[0].Connected })
	waits(t, h)
}

// What this host asked for by name, and asks for no more, is closed until the guest has withdrawn
// it: it is not opened at the guest's own port, unless it stays as somebody in the guest asks for it.
func TestDemandThatEndsOpensNothing(t *testing.T) {
	synctest.Test(t, testDemandThatEndsOpensNothing) // the guest has a time, also on a busy machine
}

func testDemandThatEndsOpensNothing(t *testing.T) {
	to := func(text string) *rules.Set {
		n, err := rules.ParseHostPort(text)
		if err != nil {
			t.Fatal(err)
		}
		d, err := port.ParseDemand("web:80")
		if err != nil {
			t.Fatal(err)
		}
		s, err := rules.Empty(rules.Loopback()).WithRuntime([]rules.Rule{{
			Match: rules.Match{Protocol: d.Protocol, Ports: []rules.PortRange{{First: d.Port, Last: d.Port}}, Demand: d}, HostPort: n,
		}})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	nothing := rules.Empty(rules.Loopback())
	byName := webByName()
	a, network := newAgent(t, "vm"), newMemory()
	a.begins(snapshot(1, byName))
	h, _ := startGuests(t, Options{Guests: []Guest{a.demandingGuest()}, Policy: to("18080"), Network: network})
	asks := func(want string) {
		t.Helper()
		if got := fmt.Sprint((<-a.demands).Ports); got != want {
			t.Errorf("%s is asked for, want %s", got, want)
		}
	}
	tries := func() int {
		network.mu.Lock()
		defer network.mu.Unlock()
		return len(network.tries)
	}
	opens := func(want string) {
		t.Helper()
		if o := a.wants(byName.Key, port.Active); o.HostAddress.String() != want {
			t.Errorf("open at %s, want %s", o.HostAddress, want)
		}
	}
	asks("[web:80/tcp]")
	opens("127.0.0.1:18080")
	h.SetPolicy(nothing)
	asks("[]")
	a.wants(byName.Key, port.Pending)
	if n := tries(); n != 1 || network.isOpen(netip.MustParseAddrPort("127.0.0.1:18080")) {
		t.Errorf("%d addresses were opened, want the first one alone, and closed", n)
	}
	h.SetPolicy(to("18081")) // it is asked for anew
	asks("[web:80/tcp]")
	opens("127.0.0.1:18081")
	h.SetPolicy(nothing)
	asks("[]")
	a.wants(byName.Key, port.Pending)
	a.say(wire.Control{Change: &wire.Change{Base: 1, Generation: 2, Removed: wire.List[port.Key]{byName.Key}}})
	eventually(t, "it is gone", func() bool { return h.View().Len() == 0 })
	if n := tries(); n != 2 {
		t.Errorf("%d addresses were opened, want 2", n)
	}
	h.SetPolicy(to("18082"))
	asks("[web:80/tcp]")
	a.say(wire.Control{Change: &wire.Change{Base: 2, Generation: 3, Put: wire.List[wire.Publication]{byName}}})
	opens("127.0.0.1:18082")
	h.SetPolicy(nothing)
	asks("[]")
	began := time.Now()
	a.wants(byName.Key, port.Pending)
	opens("127.0.0.1:80") // somebody in the guest asks for it
	if d := time.Since(began); d < withdrawalTime/2 || d > 2*withdrawalTime {
		t.Errorf("it was opened after %s, want %s", d, withdrawalTime)
	}
}

// takingGuest returns the guest of a host that does not run. It takes forwards by name, and was
// told that nothing is asked for. h.mu is held until the test ends.
func takingGuest(t *testing.T) *guest {
	t.Helper()
	dial := func(context.Context) (link.Session, error) { return nil, errors.New("not reachable") }
	h, err := New(Options{Guests: []Guest{{Name: "vm", Dial: dial}}, Policy: rules.Empty(rules.Loopback())})
	if err != nil {
		t.Fatal(err)
	}
	h.mu.Lock()
	t.Cleanup(h.mu.Unlock)
	g := h.guests[0]
	g.connected, g.peer.Demand, g.demands.sent = true, true, []string{}
	return g
}

// The time to withdraw a port begins when the guest is told in its present session. What it has
// not reported again by then is not its own.
func TestEndOfDemandCountsInItsSession(t *testing.T) {
	byName, now := webByName(), time.Now()
	g := takingGuest(t)
	g.demands.ended = map[string]time.Time{"web:80/tcp": now.Add(-time.Second)} // told in an earlier session
	g.put(byName)
	g.demandsBegin(g.peer)
	if g.decideEnded(now); len(g.pubs[byName.Key].claims) > 0 {
		t.Error("it was opened before the guest was told")
	}
	if g.demandMessage() == nil {
		t.Error("the guest is not told")
	}
	g.kept.add(byName.Key, true)
	if g.decideEnded(now.Add(withdrawalTime / 2)); g.pubs[byName.Key] == nil {
		t.Error("it was removed before its time")
	}
	if g.decideEnded(now.Add(time.Minute)); g.pubs[byName.Key] != nil {
		t.Error("what the guest has not reported again is there")
	}
}

// Changes of what a host asks for leave the time that the guest has for others alone.
func TestEndOfDemandIsItsOwn(t *testing.T) {
	g, early := takingGuest(t), time.Now().Add(-time.Second)
	g.demands.sent, g.demands.ended = []string{"db:1/tcp"}, map[string]time.Time{"web:80/tcp": early}
	g.noteEnded()
	if got := g.demands.ended["web:80/tcp"]; !got.Equal(early) || !g.demands.ended["db:1/tcp"].After(early) {
		t.Errorf("%v, want web:80 at %s and db:1 later", g.demands.ended, early)
	}
	g.demands.asked = []string{"web:80/tcp"}
	if g.noteEnded(); len(g.demands.ended) != 1 {
		t.Errorf("%v, want db:1 alone: web:80 is asked for anew", g.demands.ended)
	}
}

// waits checks what the host lists of ports that are asked for by name and are not there.
func waits(t *testing.T, h *Host, want ...string) {
	t.Helper()
	var got []string
	eventually(t, fmt.Sprintf("%q are listed", want), func() bool {
		got = nil
		for _, u := range h.Unpublished().View().All() {
			if u.Waits != "" && !u.Address.IsValid() && u.Pending && u.Port == 80 {
				got = append(got, fmt.Sprintf("%s %s %s", u.Guest, u.Waits, u.Reason))
			}
		}
		return slices.Equal(got, want)
	})
}

// What waits in one of several guests is listed unless another of those that were asked has
// it, and what guests ask for themselves beside it.
func TestListsWhatWaits(t *testing.T) {
	vm, dev := newAgent(t, "vm"), newAgent(t, "dev")
	guest := func(a *agent, takes bool) Guest {
		return Guest{Name: a.name, Dial: func(ctx context.Context) (link.Session, error) {
			s, err := a.connect(ctx)
			if err == nil && takes {
				s = demanding{s}
			}
			return s, err
		}}
	}
	vm.begins(snapshot(1))
	h, _ := startGuests(t, Options{Guests: []Guest{guest(vm, true), guest(dev, false)}, Policy: asking(t, "web:80"), Grace: -1})
	<-vm.demands
	say := func(a *agent, list ...wire.Waiting) { a.say(wire.Control{Demanded: &wire.Demanded{Waiting: list}}) }
	say(vm, wire.Waiting{Port: "web:80/tcp", Reason: "no container"})
	waits(t, h, `dev web:80/tcp guest "dev" is not connected`, "vm web:80/tcp no container")
	say(vm)
	waits(t, h)
	say(vm, wire.Waiting{Port: "own:80/tcp", Reason: "no container"}, wire.Waiting{Port: "no\x1bname", Reason: "?"})
	waits(t, h, "vm own:80/tcp no container")
	since := func() (at time.Time) {
		for _, u := range h.Unpublished().View().All() {
			at = u.Since
		}
		return at
	}
	at := since()
	say(vm, wire.Waiting{Port: "own:80/tcp", Reason: "two"})
	waits(t, h, "vm own:80/tcp two")
	if got := since(); !got.Equal(at) || at.IsZero() {
		t.Errorf("it waits since %s, want %s", got, at)
	}
	vm.drop(errors.New("gone"))
	waits(t, h, `dev web:80/tcp guest "dev" is not connected`, `vm web:80/tcp guest "vm" is not connected`)
	h.SetPolicy(asking(t))
	waits(t, h)
}
