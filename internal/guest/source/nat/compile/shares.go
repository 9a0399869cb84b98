// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
)

// share is what one entry gets of the packets for a slot at a hook.
type share struct {
	*entry
	region.Bounds
	doubt port.Reason // why not all that is possible is certain, no reason if it is
	order string      // why it is not certain that no other rule comes first
}

// tableMarks is why a rule that tests the packet mark decides nothing for certain. Tables
// without a NAT chain are not read, and a program or a BPF program may set a mark as well.
const tableMarks = "tests the packet mark, which another table may set"

// hookEntries returns the entries that packets for a slot meet at a hook, in
// order. crowded says that there are too many to be looked at.
func (c *Compiler) hookEntries(id slotID, hook uint8) (list []*entry, crowded bool) {
	bit := protocolBit(byte(id.slot.Protocol))
	wide := c.index.wide[wideID{id.v6, hook}]
	crowded = len(wide) > maxWide
	if !crowded {
		for _, e := range wide {
			if e.m.Protocols&bit != 0 && region.Ports().Contains(e.m.Dport, id.slot.Port) {
				list = append(list, e)
			}
		}
	}
	for _, e := range c.index.slots[id] {
		if e.act.hook == hook {
			list = append(list, e)
		}
	}
	slices.SortFunc(list, (*entry).before)
	if len(list) > maxSlotEntries {
		return list[:maxSlotEntries], true
	}
	return list, crowded
}

// taken is what entries have taken of a slot's packets: all of certain, and
// nothing outside possible.
type taken struct {
	region.Bounds
	unsure []share // of entries that may have taken some
	spared *share  // of entries that took some sources, which a changing set holds
}

// maxTaken bounds the boxes of what is taken. Boxes that differ in one address
// field are one.
const maxTaken = 256

// add adds what an entry takes. Beyond the bound anything may be taken.
func (t *taken) add(e *entry, b region.Bounds, v6 bool) {
	t.Bounds = region.Space{V6: v6, MaxBoxes: maxTaken}.Or(t.Bounds, b)
	if b.Certain.Empty() {
		t.doubtful(e, b.Possible)
	}
}

// doubtful notes that because of an entry it is not certain who took r.
func (t *taken) doubtful(e *entry, r region.Region) {
	if len(t.unsure) < maxTaken && !r.Empty() {
		t.unsure = append(t.unsure, share{entry: e, Bounds: region.Bounds{Possible: r}})
	}
}

// spare notes packets of which an entry took some sources that may come and go.
func (t *taken) spare(e *entry, r region.Region, v6 bool) {
	b := region.Bounds{Possible: r}
	if t.spared == nil {
		t.spared = &share{entry: e}
	}
	t.spared.Bounds = region.Space{V6: v6, MaxBoxes: maxTaken}.Or(t.spared.Bounds, b)
}

// doubt names the first entry that may have taken some of r.
func (t *taken) doubt(sp region.Space, r region.Region) port.Reason {
	for i := range t.unsure {
		u := &t.unsure[i]
		if slices.ContainsFunc(r, func(b region.Box) bool { return sp.OverlapsBox(u.Possible, &b) }) {
			if u.m.marks && len(u.m.opaque) == 0 {
				return port.Because(port.EarlierMarks, u.rule.text())
			}
			if u.m.others || u.m.clients != "" {
				return port.Because(port.EarlierChanging, u.rule.text())
			}
			if u.m.maybe {
				return port.Because(port.EarlierTable, u.rule.text())
			}
			return port.Because(port.EarlierUnread, u.rule.text())
		}
	}
	return port.Reason{}
}

// walk follows the packets for a slot through the entries of a hook.
type walk struct {
	space    region.Space
	left     taken                  // the nat chains: translated or dropped
	returned map[*activation]*taken // the chain entered by the activation
	accepted map[*activation]*taken // the base chain of the root
	balanced map[*table]*taken      // by rules of the table that leave some packets of each kind
}

// shares returns what each entry of list gets: what it matches and no entry before
// it took. Entries that get nothing are left out.
func (c *Compiler) shares(id slotID, list []*entry, crowded bool) []share {
	w := walk{space: region.Space{V6: id.v6}}
	out := make([]share, 0, len(list))
	one, bit := region.Ports().One(id.slot.Port), protocolBit(byte(id.slot.Protocol))
	for _, e := range list {
		box := e.m.Box
		box.Dport, box.Protocols = one, bit
		if e.act.hook == ruleset.HookOutput { // to this machine itself
			box.To &= region.Local
			box.Out = region.Names().Intersect(box.Out, c.host.loopbacks)
		}
		s := w.share(e, box)
		if s.Possible.Empty() {
			continue
		}
		if crowded {
			s.Certain, s.doubt = nil, port.Because(port.ManyRulesBefore)
		}
		w.take(e, s.Bounds)
		out = append(out, s)
	}
	if len(out) > 0 {
		w.order(out, list)
		w.marks(out, list)
	}
	return out
}

// marks notes which shares other packets may get than those of the share, because they
// have a packet mark.
func (w *walk) marks(shares []share, list []*entry) {
	if !slices.ContainsFunc(list, func(e *entry) bool { return e.m.marks }) {
		return
	}
	for i := range shares {
		s := &shares[i]
		if !s.publishable() || s.order != "" {
			continue
		}
		if s.m.marks {
			s.order = "it " + tableMarks
			continue
		}
		for _, e := range list {
			if e == s.entry {
				break
			}
			if e.m.marks && e.keeps(s.entry) && w.space.OverlapsBox(s.Possible, &e.m.Box) {
				s.order = "an earlier rule " + tableMarks + ": " + e.rule.text()
				break
			}
		}
	}
}

// keeps reports whether packets that e takes do not come to f, which is after it.
func (e *entry) keeps(f *entry) bool {
	switch e.end.kind {
	case endReturn:
		return f.within(e.act)
	case endAccept:
		return f.act.root == e.act.root
	}
	return true
}

// order notes which shares another rule may be met before.
func (w *walk) order(shares []share, list []*entry) {
	for i := range shares {
		s := &shares[i]
		if !s.publishable() {
			continue
		}
		if e := s.rival(list, func(e *entry) bool { return w.space.OverlapsBox(s.Possible, &e.m.Box) }); e != nil {
			s.order = fmt.Sprintf("of two rules of priority %d it is not known which is first; the other is in table %s: %s",
				e.act.root.chain.hook.Priority, e.rule.chain.table.id, e.rule.text())
		}
	}
}

// rival returns an entry of list that decides about the same packets as e, where it
// is not known which of their base chains is first; nil if there is none.
func (e *entry) rival(list []*entry, same func(*entry) bool) *entry {
	root := e.act.root.chain
	if list[0].act.root.chain == root && list[len(list)-1].act.root.chain == root {
		return nil // the list is sorted by base chain
	}
	for _, f := range list {
		decides := (f.end.kind == endNat || f.end.kind == endDrop) && !f.m.maybe && !f.m.marked
		if decides && !root.orderKnown(f.act.root.chain) && same(f) {
			return f
		}
	}
	return nil
}

// share returns what is left of box for e.
func (w *walk) share(e *entry, box region.Box) share {
	s := share{entry: e, Bounds: region.Exactly(region.Of(box))}
	if s.Possible.Empty() {
		return s
	}
	subtract := func(t *taken) {
		if s.Possible.Empty() {
			return
		}
		before := s.Certain
		s.Bounds = w.space.Without(s.Bounds, t.Bounds)
		if s.doubt.IsZero() {
			s.doubt = t.doubt(w.space, before)
		}
	}
	subtract(&w.left)
	for t, taken := range w.balanced {
		if t != e.rule.chain.table { // else it is another target for the same clients
			subtract(taken)
		}
	}
	w.eachScope(e, subtract)
	if s.Certain.Empty() && s.doubt.IsZero() {
		s.doubt = port.Because(port.OverlappedRules)
	}
	return s
}

// eachScope calls f with what has left the chains that e is in.
func (w *walk) eachScope(e *entry, f func(*taken)) {
	if t := w.accepted[e.act.root]; t != nil {
		f(t)
	}
	for a := e.act; a != nil && len(w.returned) > 0; a = a.parent {
		if a.parent == nil && e.isPolicy() {
			break // a packet that returns from a base chain meets its policy
		}
		if t := w.returned[a]; t != nil {
			f(t)
		}
	}
}

// isPolicy reports whether e is the policy of a base chain.
func (e *entry) isPolicy() bool { return e.rule.raw == nil && e.rule.pos == policyPosition }

// take notes what e takes of its share.
func (w *walk) take(e *entry, b region.Bounds) {
	switch {
	case e.m.marked:
		return // no new connection meets it
	case e.m.maybe && (e.end.kind == endNat || e.end.kind == endUnknown):
		b.Certain = nil
		scoped(&w.balanced, e.rule.chain.table).add(e, b, w.space.V6)
		return
	case e.m.maybe && (e.m.clients == "" || e.end.kind == endDrop):
		return // it leaves some of each kind
	case len(e.m.opaque) > 0, e.m.marks, e.m.others:
		b.Certain = nil
	}
	to := &w.left
	switch e.end.kind {
	case endReturn:
		to = scoped(&w.returned, e.act)
	case endAccept:
		to = scoped(&w.accepted, e.act.root)
	}
	if e.m.maybe {
		to.spare(e, b.Possible, w.space.V6)
		return
	}
	w.eachScope(e, func(t *taken) {
		if t.spared != nil {
			was := b.Certain
			b.Certain = w.space.Without(b, t.spared.Bounds).Certain
			lost, _ := w.space.Subtract(was, b.Certain)
			to.doubtful(t.spared.entry, lost)
		}
	})
	to.add(e, b, w.space.V6)
}

// scoped returns what was taken in a scope: the chain that an activation entered,
// or a table.
func scoped[K comparable](m *map[K]*taken, a K) *taken {
	if *m == nil {
		*m = make(map[K]*taken)
	}
	if (*m)[a] == nil {
		(*m)[a] = &taken{}
	}
	return (*m)[a]
}
