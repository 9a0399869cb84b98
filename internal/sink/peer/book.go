// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
)

// Book keeps what is wanted, who gets which host address, and what became of
// each claim. It is not safe for concurrent use.
type Book struct {
	*Shares
	pubs    map[port.Key]port.Publication
	results map[port.Slot]map[Claim]port.Outcome
	touched map[port.Key]struct{}
	absent  bool
	reason  string // why
}

// NewBook returns an empty book.
func NewBook() *Book {
	return &Book{
		Shares: NewShares(), pubs: make(map[port.Key]port.Publication),
		results: make(map[port.Slot]map[Claim]port.Outcome), touched: make(map[port.Key]struct{}),
	}
}

// Take notes what changed of what is wanted.
func (b *Book) Take(want reconcile.View, change reconcile.Change) {
	set := func(k port.Key) {
		p, ok := want.Get(k)
		if !ok {
			delete(b.pubs, k)
			b.Set(k, nil)
			return
		}
		b.pubs[k] = p
		b.Set(k, p.Decision.Host)
	}
	if change.Base != 0 {
		for _, k := range change.Keys {
			set(k)
		}
		return
	}
	for _, k := range slices.Collect(maps.Keys(b.pubs)) {
		set(k)
	}
	for k := range want.All() {
		set(k)
	}
}

// Publication returns one that is wanted.
func (b *Book) Publication(k port.Key) port.Publication { return b.pubs[k] }

// Pending says that there is no peer: of every key when that or its reason is
// new, else of those that change.
func (b *Book) Pending(change reconcile.Change, reason string) port.Outcomes {
	out := make(port.Outcomes)
	say := func(k port.Key) {
		if _, ok := b.pubs[k]; ok {
			out[k] = []port.Outcome{{Key: k, State: port.Pending, Reason: reason}}
		}
	}
	if b.absent && b.reason == reason {
		for _, k := range change.Keys {
			say(k)
		}
		return out
	}
	b.absent, b.reason = true, reason
	for k := range b.pubs {
		say(k)
	}
	return out
}

// Present says that there is a peer, and reports whether there was none before.
func (b *Book) Present() bool {
	was := b.absent
	b.absent = false
	return was
}

// Judge shares out a slot: it returns who gets which host address, and has an
// outcome for those who get none. It begins the slot anew: nothing is said of
// the others yet.
func (b *Book) Judge(slot port.Slot) map[netip.Addr]port.Key {
	for c := range b.results[slot] {
		b.touched[c.Key] = struct{}{}
	}
	delete(b.results, slot)
	granted, lost := b.Share(slot)
	for c, by := range lost {
		b.Say(c, port.Conflict, fmt.Sprintf("%s serves %s", c.Host, by))
	}
	return granted
}

// Say notes what became of a claim.
func (b *Book) Say(c Claim, state port.State, reason string) {
	slot := port.Slot{Protocol: c.Key.Protocol, Port: c.Host.Port()}
	if b.results[slot] == nil {
		b.results[slot] = make(map[Claim]port.Outcome)
	}
	b.results[slot][c] = port.Outcome{Key: c.Key, State: state, HostAddress: c.Host, Reason: reason}
	b.touched[c.Key] = struct{}{}
}

// Outcomes returns what became of the publications that anything was said of
// since the last call.
func (b *Book) Outcomes() port.Outcomes {
	out := make(port.Outcomes, len(b.touched))
	for k := range b.touched {
		if _, ok := b.pubs[k]; !ok {
			continue
		}
		list := []port.Outcome{}
		for _, h := range b.Asked(k) {
			if o, ok := b.results[port.Slot{Protocol: k.Protocol, Port: h.Port()}][Claim{k, h}]; ok {
				list = append(list, o)
			}
		}
		out[k] = list
	}
	clear(b.touched)
	return out
}

// Poke sends to a channel of capacity one, if there is room.
func Poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// SortedSlots returns slots by port and protocol.
func SortedSlots(slots map[port.Slot]struct{}) []port.Slot {
	return slices.SortedFunc(maps.Keys(slots), CompareSlots)
}

// CompareSlots orders slots by port and protocol.
func CompareSlots(a, b port.Slot) int {
	return port.Key{Protocol: a.Protocol, Port: a.Port}.Compare(port.Key{Protocol: b.Protocol, Port: b.Port})
}
