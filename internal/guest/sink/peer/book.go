// SPDX-License-Identifier: Apache-2.0

// Package peer is the common part of the sinks for foreign peers: programs that
// forward ports, and know neither publications nor sessions.
package peer

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/claims"
	"github.com/fairlead/fairlead/internal/port/compact"
)

// Claim is one publication's wish for one host address.
type Claim struct {
	Key  port.Key
	Host netip.AddrPort
}

// slot returns the protocol and host port of a claim.
func (c Claim) slot() port.Slot { return port.Slot{Protocol: c.Key.Protocol, Port: c.Host.Port()} }

// shared is a claim that another one serves, and the host address of its outcome.
type shared struct {
	Claim
	at netip.AddrPort
}

// Book keeps what is wanted, who gets which host address, and what became of
// each claim. The zero value is not usable: see NewBook. It is not safe for
// concurrent use.
type Book struct {
	pubs     map[port.Key]port.Publication
	slots    map[port.Slot]map[Claim]port.Outcome // by protocol and host port; no state: nothing to report yet
	served   map[Claim][]shared                   // other claims that a winner serves
	dirty    map[port.Slot]struct{}
	narrowed map[Claim]struct{}    // wildcards that could not be had
	reported map[port.Key]struct{} // since the last Outcomes
	absent   bool
	reason   port.Reason // why
	peak     compact.Peak
}

// NewBook returns an empty book.
func NewBook() *Book {
	return &Book{
		pubs: make(map[port.Key]port.Publication), slots: make(map[port.Slot]map[Claim]port.Outcome),
		served: make(map[Claim][]shared), dirty: make(map[port.Slot]struct{}), reported: make(map[port.Key]struct{}),
		narrowed: make(map[Claim]struct{}),
	}
}

// Update applies what changed of what is wanted. The slots of a publication that
// is named are dirty then, even if it asks for the same addresses: it may be
// served in another way.
func (b *Book) Update(want reconcile.View, change reconcile.Change) {
	if change.Base != 0 {
		for _, k := range change.Keys {
			b.update(want, k)
		}
		return
	}
	for _, k := range slices.Collect(maps.Keys(b.pubs)) {
		b.update(want, k)
	}
	for k := range want.All() {
		b.update(want, k)
	}
}

func (b *Book) update(want reconcile.View, k port.Key) {
	for _, h := range b.pubs[k].Decision.Host {
		c := Claim{k, h}
		b.dirty[c.slot()] = struct{}{}
		delete(b.slots[c.slot()], c)
		delete(b.served, c)
		delete(b.narrowed, c)
		if len(b.slots[c.slot()]) == 0 {
			delete(b.slots, c.slot())
		}
	}
	p, ok := want.Get(k)
	if !ok {
		delete(b.pubs, k)
		return
	}
	b.pubs[k] = p
	for _, h := range p.Decision.Host {
		c := Claim{k, h}
		b.dirty[c.slot()] = struct{}{}
		if b.slots[c.slot()] == nil {
			b.slots[c.slot()] = make(map[Claim]port.Outcome)
		}
		b.slots[c.slot()][c] = port.Outcome{}
	}
}

// Publication returns one that is wanted.
func (b *Book) Publication(k port.Key) port.Publication { return b.pubs[k] }

// Wanted reports whether a publication is wanted at any host address.
func (b *Book) Wanted(k port.Key) bool { return len(b.pubs[k].Decision.Host) > 0 }

// Dirty is the set of slots to look at. The caller deletes those it has looked at.
func (b *Book) Dirty() map[port.Slot]struct{} { return b.dirty }

// MarkAll makes every slot dirty that anything asks for.
func (b *Book) MarkAll() {
	for slot := range b.slots {
		b.dirty[slot] = struct{}{}
	}
}

// Pending returns outcomes for the time without a peer: of every publication when
// the peer went or the reason is new, else of those that change.
func (b *Book) Pending(change reconcile.Change, reason port.Reason) port.Outcomes {
	keys := slices.Values(change.Keys)
	if !b.absent || b.reason != reason {
		b.absent, b.reason = true, reason
		keys = maps.Keys(b.pubs)
	}
	b.shrink()
	out := make(port.Outcomes)
	for k := range keys {
		if _, ok := b.pubs[k]; ok {
			out[k] = []port.Outcome{{State: port.Pending, Reason: reason}}
		}
	}
	return out
}

// Present notes that there is a peer, and reports whether there was none before.
func (b *Book) Present() bool {
	was := b.absent
	b.absent = false
	return was
}

// Decide returns who gets which host address of a slot (see package claims) and
// reports conflicts. The other outcomes of the slot are forgotten until Report.
func (b *Book) Decide(slot port.Slot) map[netip.Addr]port.Key {
	all := slices.Collect(maps.Keys(b.slots[slot]))
	asked := make([]claims.Claim, 0, len(all))
	for _, c := range all {
		p := b.pubs[c.Key]
		a := claims.Of(&p, c.Host)
		_, a.Unavailable = b.narrowed[c]
		asked = append(asked, a)
		b.slots[slot][c] = port.Outcome{}
		b.reported[c.Key] = struct{}{}
		delete(b.served, c)
	}
	winners := make(map[netip.Addr]port.Key)
	for i, v := range claims.Decide(asked) {
		c, by := all[i], all[v.Winner]
		switch {
		case v.Conflict:
			b.Report(c, port.Conflict, claims.Held(by.Host, asked[v.Winner].String()))
		case by == c:
			winners[c.Host.Addr()] = c.Key
		default:
			b.served[by] = append(b.served[by], shared{c, c.Host})
		}
	}
	return winners
}

// Narrow has the claims that a wildcard serves be served each at its own address from
// the next Decide on, because the peer cannot have the wildcard. It reports whether
// there are any; their slot is dirty then.
func (b *Book) Narrow(wildcard Claim) bool {
	if !port.IsWildcard(wildcard.Host.Addr()) ||
		!slices.ContainsFunc(b.served[wildcard], func(o shared) bool { return o.Host != wildcard.Host }) {
		return false
	}
	b.narrowed[wildcard] = struct{}{}
	b.dirty[wildcard.slot()] = struct{}{}
	return true
}

// Widen ends what Narrow began for the wildcards of a slot.
func (b *Book) Widen(slot port.Slot) {
	maps.DeleteFunc(b.narrowed, func(c Claim, _ struct{}) bool { return c.slot() == slot })
}

// Share has a winner serve c too, at the winner's address, and reports whether it
// can: they must be of one server. It is for peers that cannot serve both addresses.
func (b *Book) Share(c, winner Claim) bool {
	p, q := b.pubs[c.Key], b.pubs[winner.Key]
	if !claims.Same(claims.Of(&p, c.Host), claims.Of(&q, winner.Host)) {
		return false
	}
	for _, o := range append(b.served[c], shared{Claim: c}) {
		b.served[winner] = append(b.served[winner], shared{o.Claim, winner.Host})
	}
	delete(b.served, c)
	return true
}

// Report notes what became of a claim, and so of those that it serves.
func (b *Book) Report(c Claim, state port.State, reason port.Reason) {
	b.report(c, c.Host, state, reason)
	for _, o := range b.served[c] {
		b.report(o.Claim, o.at, state, reason)
	}
}

func (b *Book) report(c Claim, at netip.AddrPort, state port.State, reason port.Reason) {
	b.slots[c.slot()][c] = port.Outcome{State: state, HostAddress: at, Reason: reason}
	b.reported[c.Key] = struct{}{}
}

// Outcomes returns what became of the publications that were reported since the
// last call.
func (b *Book) Outcomes() port.Outcomes {
	out := make(port.Outcomes, len(b.reported))
	for k := range b.reported {
		p, ok := b.pubs[k]
		if !ok {
			continue
		}
		list := []port.Outcome{}
		for _, h := range p.Decision.Host {
			c := Claim{k, h}
			if o := b.slots[c.slot()][c]; o.State != 0 {
				list = append(list, o)
			}
		}
		out[k] = list
	}
	b.reported = compact.Clear(b.reported)
	b.shrink()
	return out
}

// shrink makes the maps anew if most of what was wanted is gone.
func (b *Book) shrink() {
	if b.peak.Passed(len(b.pubs)) {
		b.pubs, b.slots, b.served, b.dirty = compact.Map(b.pubs), compact.Map(b.slots), compact.Map(b.served), compact.Map(b.dirty)
	}
}
