// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
)

var (
	rule1    = port.RuleRef{Kind: port.RuleConfigured, Number: 1}
	denial   = rule1.Because(port.DeniedByRule)
	waiting  = port.Because(port.OwnerAwaited)
	withheld = port.Because(port.Unlistened)
)

// unpublishedMessage names ports of the first generation, or changes it.
func unpublishedMessage(first bool, reason port.Reason, keys ...port.Key) wire.Frame {
	var rows []port.Fact
	for _, k := range keys {
		rows = append(rows, port.Fact{Key: k, Source: "socket", Decision: port.Decision{Rule: rule1, Reason: reason}})
	}
	f := wire.Frame{Table: "unpublished", Generation: 1, Put: rowsOf(rows...)}
	if !first {
		f.Base = 1
	}
	return f
}

// reasons are those of all unpublished ports, by their numbers.
func reasons(h *Host) map[uint16]string {
	m := make(map[uint16]string)
	for id, u := range h.Unpublished().View().All() {
		m[id.Port] = u.Decision.Reason.String()
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

func (p strictPolicy) Host(_ string, pub port.Publication, asked []netip.AddrPort) port.Ruling {
	if pub.Key == p.k {
		p.t.Errorf("the policy was asked about %s", pub.Key)
	}
	return port.Ruling{Decision: port.Decision{Allow: true, Host: asked}}
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
	gone := unpublishedMessage(false, denial)
	gone.Removed, gone.Omitted = rowsOf(other), 7
	a.say(gone, wire.Frame{Table: "unread", Generation: 1, Put: rowsOf(wire.Unread{Rule: "r"}, wire.Unread{Rule: "q"})})
	wantReasons(t, h, "one is left", map[uint16]string{9229: denial.String()})
	eventually(t, "the rules, sorted", func() bool {
		g := h.Guests()[0]
		return g.Omitted == 7 && slices.Equal(g.Unread, []wire.Unread{{Rule: "q"}, {Rule: "r"}})
	})
	sub := h.Unpublished().Subscribe()
	defer sub.Close()
	sub.Take()

	// A new session names them anew, in two parts; what it does not name is gone. What it
	// names was never removed.
	first, second := unpublishedMessage(true, denial, other), unpublishedMessage(true, denial, hidden)
	first.More, second.Part = true, 1
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

// A row that is sent again in the step that removes it is there.
func TestUnpublishedPortIsRemovedAndSentAgain(t *testing.T) {
	a := newAgent(t, "vm")
	k, other := key(port.TCP, any4, 9229), key(port.TCP, any4, 53)
	again := unpublishedMessage(false, withheld, k)
	again.Removed = rowsOf(k, other)
	a.begins(snapshot(1), unpublishedMessage(true, denial, k, other), again)
	h, _ := start(t, Options{Network: newMemory()}, a)
	wantReasons(t, h, "the new row", map[uint16]string{9229: withheld.String()})
}

// A guest that sends more than it may is disconnected.
func TestUnpublishedPortsAreLimited(t *testing.T) {
	many := func(first uint16, n int) (ports []port.Fact) {
		for i := range n {
			ports = append(ports, port.Fact{Key: key(port.TCP, any4, first+uint16(i))})
		}
		return ports
	}
	var rules []wire.Unread
	for i := range wire.MaxUnread + 1 {
		rules = append(rules, wire.Unread{Rule: fmt.Sprint(i)})
	}
	for name, fs := range map[string][]wire.Frame{
		"ports": {{Table: "unpublished", Generation: 1, Put: rowsOf(many(1, wire.MaxUnpublished)...)},
			{Table: "unpublished", Base: 1, Generation: 2, Put: rowsOf(many(20000, 1)...)}},
		"rules": {{Table: "unread", Generation: 1, Put: rowsOf(rules[:1]...)}, {Table: "unread", Base: 1, Generation: 2, Put: rowsOf(rules[1:]...)}},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t, "vm")
			a.begins(append([]wire.Frame{snapshot(1)}, fs...)...)
			h, _ := start(t, Options{Network: newMemory()}, a)
			eventually(t, "the session is ended and tried again", func() bool {
				a.mu.Lock()
				defer a.mu.Unlock()
				return a.dials > 1
			})
			if n := h.Unpublished().View().Len(); n > wire.MaxUnpublished+1 {
				t.Errorf("%d are kept", n)
			}
		})
	}
}
