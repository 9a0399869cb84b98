// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
)

var (
	rule1    = port.RuleRef{Kind: port.RuleConfigured, Number: 1}
	denial   = rule1.Because(port.DeniedByRule)
	waiting  = port.Because(port.OwnerAwaited)
	withheld = port.Because(port.Unlistened)
)

func unpublishedMessage(reset bool, reason port.Reason, keys ...port.Key) wire.Control {
	u := &wire.Unpublished{Reset: reset}
	for _, k := range keys {
		u.Put = append(u.Put, wire.UnpublishedPort{Key: k, Rule: rule1, Reason: wire.FromReason(reason), Source: "socket"})
	}
	return wire.Control{Unpublished: u}
}

// reasons are those of all unpublished ports, by their numbers.
func reasons(h *Host) map[uint16]string {
	m := make(map[uint16]string)
	for id, u := range h.Unpublished().View().All() {
		m[id.Port] = u.Reason.String()
	}
	return m
}

func wantReasons(t *testing.T, h *Host, what string, want map[uint16]string) {
	t.Helper()
	eventually(t, what, func() bool {
		got := reasons(h)
		if len(got) != len(want) {
			return false
		}
		for k, v := range want {
			if got[k] != v {
				return false
			}
		}
		return true
	})
}

// The policy denies the test if it is ever asked about a port that is not published.
type strictPolicy struct {
	t *testing.T
	k port.Key
}

func (p strictPolicy) Host(_ string, pub port.Publication, asked []netip.AddrPort) port.Decision {
	if pub.Key == p.k {
		p.t.Errorf("the policy was asked about %s", pub.Key)
	}
	return port.Decision{Allow: true, Host: asked}
}

// Ports that a guest does not publish are shown with their reasons, and nothing is opened
// for them. They follow the sessions.
func TestUnpublishedPortsAreShown(t *testing.T) {
	a := newAgent(t, "vm")
	pubs, hidden, other := key(port.TCP, any4, 80), key(port.TCP, any4, 9229), key(port.UDP, any4, 53)
	a.begins(snapshot(1, pub(pubs)), unpublishedMessage(true, denial, hidden, other))
	network := newMemory()
	h, _ := start(t, Options{Network: network, Grace: time.Minute, Policy: strictPolicy{t, hidden}}, a)
	a.wants(pubs, port.Active)
	wantReasons(t, h, "both", map[uint16]string{9229: denial.String(), 53: denial.String()})
	if n := h.Stats().Listeners; n != 1 {
		t.Errorf("%d listeners", n)
	}
	a.say(wire.Control{Unpublished: &wire.Unpublished{Removed: []port.Key{other}, Omitted: 7, Unread: &wire.List[wire.Unread]{{Rule: "r"}}}})
	wantReasons(t, h, "one is left", map[uint16]string{9229: denial.String()})
	if g := h.Guests()[0]; g.Omitted != 7 || len(g.Unread) != 1 {
		t.Errorf("%+v", g)
	}
	sub := h.Unpublished().Subscribe()
	defer sub.Close()
	sub.Take()

	// A new session names them anew, in two parts; what it does not name is gone. What it
	// names was never removed.
	first, second := unpublishedMessage(true, denial, other), unpublishedMessage(false, denial, hidden)
	first.Unpublished.More = true
	a.begins(snapshot(1, pub(pubs)), first, second)
	a.drop(errors.New("lost"))
	eventually(t, "the port is lost", func() bool { p, _ := h.View().Get(ID{"vm", pubs}); return p.Lost })
	wantReasons(t, h, "kept while the guest is away", map[uint16]string{9229: denial.String()})
	a.up()
	wantReasons(t, h, "both again", map[uint16]string{9229: denial.String(), 53: denial.String()})
	eventually(t, "the port is not lost any more", func() bool { p, _ := h.View().Get(ID{"vm", pubs}); return !p.Lost })
	if _, change := sub.Take(); len(change.Keys) != 1 || change.Keys[0].Key != other {
		t.Errorf("changed: %v", change.Keys)
	}
	a.begins(snapshot(1, pub(pubs)), unpublishedMessage(true, denial))
	a.drop(errors.New("lost"))
	a.up()
	wantReasons(t, h, "none", nil)
}

// They end with the grace period, also where nothing is published.
func TestUnpublishedPortsEndWithTheGracePeriod(t *testing.T) {
	a := newAgent(t, "vm")
	a.begins(snapshot(1), unpublishedMessage(true, denial, key(port.TCP, any4, 9229)))
	h, _ := start(t, Options{Grace: 10 * time.Millisecond}, a)
	wantReasons(t, h, "shown", map[uint16]string{9229: denial.String()})
	a.drop(errors.New("lost"))
	wantReasons(t, h, "forgotten", nil)
}

// silent is a session with an agent that does not report them.
type silent struct{ link.Session }

func (o silent) Peer() link.Peer {
	p := o.Session.Peer()
	p.Unpublished = false
	return p
}

func TestUnpublishedPortsEndWithAnAgentThatReportsNone(t *testing.T) {
	a := newAgent(t, "vm")
	a.begins(snapshot(1), unpublishedMessage(true, denial, key(port.TCP, any4, 9229)))
	replaced := make(chan struct{})
	dial := func(ctx context.Context) (link.Session, error) {
		s, err := a.connect(ctx)
		select {
		case <-replaced:
			if err == nil {
				s = silent{s}
			}
		default:
		}
		return s, err
	}
	h, _ := startGuests(t, Options{Grace: time.Minute, Guests: []Guest{{Name: "vm", Dial: dial}}})
	wantReasons(t, h, "shown", map[uint16]string{9229: denial.String()})
	close(replaced)
	a.begins(snapshot(1))
	a.drop(errors.New("lost"))
	a.up()
	wantReasons(t, h, "forgotten", nil)
}

// A guest that sends more than it may costs no more than the limit.
func TestUnpublishedPortsAreLimited(t *testing.T) {
	a := newAgent(t, "vm")
	m := wire.Unpublished{Reset: true, Unread: &wire.List[wire.Unread]{}}
	for p := 1; p <= 3*wire.MaxUnpublished; p++ {
		m.Put = append(m.Put, wire.UnpublishedPort{Key: key(port.TCP, any4, uint16(p))})
		*m.Unread = append(*m.Unread, wire.Unread{})
	}
	last := key(port.TCP, any4, 60000)
	flooding(a, append(append([]wire.Control{snapshot(1)}, m.Split()...), put(1, pub(last))))
	h, _ := start(t, Options{Network: newMemory()}, a)
	a.wants(last, port.Active) // all before it was read
	if n := h.Unpublished().View().Len(); n != wire.MaxUnpublished {
		t.Errorf("%d are kept, want %d", n, wire.MaxUnpublished)
	}
	if n := len(h.Guests()[0].Unread); n != wire.MaxUnread {
		t.Errorf("%d rules are kept, want %d", n, wire.MaxUnread)
	}
}

func manyUnpublished(first uint16, reset, more bool) wire.Unpublished {
	m := wire.Unpublished{Reset: reset, More: more}
	for n := range uint16(wire.MaxUnpublished) {
		m.Put = append(m.Put, wire.UnpublishedPort{Key: key(port.TCP, any4, first+n)})
	}
	return m
}

// Ports of the former report leave room for those of a new one, which may be as many.
func TestResetReplacesAllUnpublishedPorts(t *testing.T) {
	g := newGuest(newIdleHost(t), Guest{Name: "vm"})
	first, second, third := manyUnpublished(1, true, false), manyUnpublished(10001, true, true), manyUnpublished(20001, true, true)
	g.applyUnpublished(t.Context(), &first)
	g.applyUnpublished(t.Context(), &second)
	if n := len(g.others); n > 2*wire.MaxUnpublished {
		t.Errorf("%d ports are kept during a report", n)
	}
	g.applyUnpublished(t.Context(), &third) // a report that begins before the other ended
	if n := len(g.others); n > 2*wire.MaxUnpublished {
		t.Errorf("%d ports are kept during another report", n)
	}
	for _, p := range second.Put { // too many: these are stale, and remain so
		g.applyUnpublished(t.Context(), &wire.Unpublished{More: true, Put: []wire.UnpublishedPort{p}})
	}
	g.applyUnpublished(t.Context(), &wire.Unpublished{})
	got := g.h.Unpublished().View()
	if got.Len() != wire.MaxUnpublished || len(g.others) != got.Len() {
		t.Errorf("%d ports, want %d", got.Len(), wire.MaxUnpublished)
	}
	for _, p := range third.Put {
		if _, ok := got.Get(ID{"vm", p.Key}); !ok {
			t.Fatalf("%s is missing", p.Key)
		}
	}
}

// A port that a part of a report removes is not counted twice.
func TestRemovedDuringReset(t *testing.T) {
	g := newGuest(newIdleHost(t), Guest{Name: "vm"})
	first, second := manyUnpublished(1, true, false), manyUnpublished(10001, false, false)
	g.applyUnpublished(t.Context(), &first)
	g.applyUnpublished(t.Context(), &wire.Unpublished{Reset: true, More: true})
	second.Removed = []port.Key{first.Put[0].Key}
	second.Put = append(second.Put, wire.UnpublishedPort{Key: key(port.UDP, any4, 1)})
	g.applyUnpublished(t.Context(), &second)
	if n := len(g.others); n != wire.MaxUnpublished {
		t.Errorf("%d ports, want %d", n, wire.MaxUnpublished)
	}
}

func newIdleHost(t *testing.T) *Host {
	t.Helper()
	h, err := New(Options{Network: newMemory()})
	if err != nil {
		t.Fatal(err)
	}
	return h
}
