// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/wire"
)

// guestPorts is the table of all ports of a guest, and the NAT rules beside it.
type guestPorts struct {
	*table.Table[port.Key, port.Publication]
	rules   []wire.Unread
	changed schedule.Signal
}

func newGuestPorts() *guestPorts {
	return &guestPorts{table.New[port.Key, port.Publication](port.Key.Compare), nil, schedule.NewSignal()}
}

func (g *guestPorts) options(o *Options) {
	o.Unpublished, o.Unread, o.UnreadChanged = g.Table, func() []wire.Unread { return g.rules }, g.changed
	o.maxUnpublished = 2
}

var rule1 = port.RuleRef{Kind: port.RuleConfigured, Number: 1}

func (g *guestPorts) deny(target string, keys ...port.Key) {
	g.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, k := range keys {
			p := pub(k, "web")
			p.Decision = port.Decision{Rule: rule1, Reason: rule1.Because(port.DeniedTarget, target)}
			tx.Put(k, p)
		}
	})
}

func (g *guestPorts) remove(keys ...port.Key) {
	g.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		for _, k := range keys {
			tx.Delete(k)
		}
	})
}

// unpublished collects what messages say until a condition holds.
type received struct {
	ports   map[port.Key]string // targets that rules deny
	omitted int
	rules   int
	resets  int
}

func (r *received) until(t *testing.T, p *peer, what string, ok func() bool) {
	t.Helper()
	for !ok() {
		u := p.next().Unpublished
		if u == nil {
			t.Fatalf("another message, or none, before: %s; have %+v", what, r)
		}
		if u.Reset {
			r.ports = make(map[port.Key]string)
			r.resets++
		}
		for _, k := range u.Removed {
			delete(r.ports, k)
		}
		for _, q := range u.Put {
			if q.Rule != rule1 || q.Source != "socket" || q.Owner.Name != "web" {
				t.Errorf("%+v", q)
			}
			r.ports[q.Key] = q.Reason.Args()[0]
		}
		if u.Unread != nil {
			r.rules = len(*u.Unread)
		}
		r.omitted = u.Omitted
	}
}

// A host is sent the ports that are not published, up to a limit, and what changes.
func TestUnpublishedPortsAreReported(t *testing.T) {
	g := newGuestPorts()
	g.deny("web", key(80))
	g.Update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Put(key(81), pub(key(81), "published")) })
	r := newRig(t, g.options)
	for round := range 2 { // each session begins anew
		var got received
		p := r.connect("h")
		got.until(t, p, "the first", func() bool { return len(got.ports) == 1 && got.ports[key(80)] == "web" && got.resets == 1 })
		g.deny("db", key(80))
		got.until(t, p, "another reason", func() bool { return got.ports[key(80)] == "db" })
		g.rules = []wire.Unread{wire.NewUnread("nat", "rule", "why")}
		g.changed.Notify()
		got.until(t, p, "a rule", func() bool { return got.rules == 1 })
		g.deny("web", key(82), key(83), key(84))
		got.until(t, p, "the limit", func() bool { return len(got.ports) == 2 && got.omitted == 2 })
		g.remove(key(80))
		got.until(t, p, "there is room for one more", func() bool { return len(got.ports) == 2 && got.ports[key(80)] == "" && got.omitted == 1 })
		g.remove(key(82), key(83), key(84))
		got.until(t, p, "all are gone", func() bool { return len(got.ports) == 0 && got.omitted == 0 })
		g.rules = nil
		g.deny("web", key(80))
		got.until(t, p, "and again", func() bool { return len(got.ports) == 1 })
		if got.resets != 1 {
			t.Errorf("round %d: %d resets", round, got.resets)
		}
		_ = p.Close()
	}
}

// A host that dropped a message asks for the state anew. That includes the ports that are
// not published: the message may have been about them.
func TestResyncRepeatsUnpublished(t *testing.T) {
	g := newGuestPorts()
	g.deny("web", key(80), key(81), key(82)) // one is omitted
	g.rules = []wire.Unread{wire.NewUnread("nat", "rule", "why")}
	r := newRig(t, g.options)
	p := r.connect("h")
	var got received
	complete := func(resets int) func() bool {
		return func() bool { return got.resets == resets && len(got.ports) == 2 && got.omitted == 1 && got.rules == 1 }
	}
	got.until(t, p, "the first", complete(1))
	for round := range 3 {
		got.rules, got.omitted = 0, 0
		p.say(wire.Control{Resync: &wire.Resync{Reason: "malformed"}})
		got.until(t, p, "all again", complete(2+round))
	}
	g.remove(key(80), key(81), key(82))
	got.until(t, p, "changes", func() bool { return len(got.ports) == 0 && got.omitted == 0 && got.resets == 4 })
}

// What an agent sends is what a host accepts.
func TestUnpublishedIsAccepted(t *testing.T) {
	g := newGuestPorts()
	g.deny("web", key(80))
	r := newRig(t, g.options)
	p := r.connect("h")
	var b bytes.Buffer
	if err := wire.WriteControl(&b, p.next()); err != nil {
		t.Fatal(err)
	}
	if _, err := wire.ReadControl(&b); err != nil {
		t.Error(err)
	}
}

// Without the table nothing is reported, neither ports nor NAT rules: a host is sent publications.
func TestNothingUnpublishedIsSentUnasked(t *testing.T) {
	g := newGuestPorts()
	g.rules = []wire.Unread{wire.NewUnread("ip nat pre", "meta mark 7", "meta mark")}
	options := func(o *Options) {
		g.options(o)
		o.Unpublished = nil
	}
	g.deny("web", key(80))
	r := newRig(t, options)
	r.put(pub(key(81), "published"))
	p := r.connect("h")
	in := bufio.NewReader(p.in)
	out := during(func() port.Outcomes { return r.mustSync() }, func() {
		c, err := wire.ReadControl(in)
		if err != nil || c.Snapshot == nil {
			t.Errorf("%+v, %v", c, err)
		}
		p.ack(c.Snapshot.Generation, key(81))
	})
	want(t, out, map[uint16]port.State{81: port.Active})
	g.deny("db", key(80))
	g.changed.Notify()
	_ = p.Control().SetReadDeadline(time.Now().Add(3 * unpublishedPause))
	if c, err := wire.ReadControl(in); err == nil {
		t.Errorf("sent %+v", c)
	}
}

// A flow to a port that is only reported is refused.
func TestFlowToUnpublishedPortForbidden(t *testing.T) {
	g := newGuestPorts()
	g.deny("web", key(80))
	r := newRig(t, g.options)
	p := r.connect("h")
	var got received
	got.until(t, p, "the port", func() bool { return len(got.ports) == 1 })
	st, err := p.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := wire.WriteRequest(st, wire.FlowRequest{Key: key(80)}); err != nil {
		t.Fatal(err)
	}
	if reply, err := wire.ReadReply(st); err != nil || reply.Status != wire.FlowForbidden {
		t.Errorf("%+v, %v", reply, err)
	}
	if b, err := io.ReadAll(st); len(b) > 0 || err != nil && !errors.Is(err, link.ErrReset) {
		t.Errorf("%q, %v", b, err)
	}
}

// All ports are accounted for, whatever comes and goes.
func TestUnpublishedKeepsCount(t *testing.T) {
	g := newGuestPorts()
	u := unpublished{max: 3, sent: make(map[port.Key]wire.UnpublishedPort), omitted: make(map[port.Key]struct{})}
	known := map[port.Key]bool{}
	sub := g.Subscribe()
	defer sub.Close()
	for i := range 2000 {
		k := key(uint16(1 + i*i%7))
		if i%3 == 0 {
			g.remove(k)
		} else {
			g.deny([]string{"a", "b"}[i%2], k)
		}
		view, change := sub.Take()
		m := u.update(view, change.Keys)
		for _, k := range m.Removed {
			if !known[k] {
				t.Fatalf("step %d: %s was removed and never sent", i, k)
			}
			delete(known, k)
		}
		for _, p := range m.Put {
			known[p.Key] = true
		}
		if len(known) != min(view.Len(), 3) || m.Omitted != view.Len()-len(known) {
			t.Fatalf("step %d: %d ports, %d sent, %d omitted", i, view.Len(), len(known), m.Omitted)
		}
		for k := range known {
			if _, ok := view.Get(k); !ok {
				t.Fatalf("step %d: %s is gone", i, k)
			}
		}
	}
	if !slices.Contains([]int{0, 1, 2, 3}, len(u.sent)) {
		t.Errorf("%d are kept", len(u.sent))
	}
}
