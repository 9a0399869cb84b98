// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"slices"

	"github.com/fairlead/fairlead/internal/source/nat/region"
	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// share is what one entry gets of the packets for a slot at a hook.
type share struct {
	*entry
	region.Bounds
	doubt string // why not all that is possible is certain
}

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
	first *entry // that may have taken some, and is not understood
}

func (t *taken) add(e *entry, b region.Bounds) {
	t.Certain = append(t.Certain, b.Certain...)
	t.Possible = append(t.Possible, b.Possible...)
	if t.first == nil && len(e.m.opaque) > 0 {
		t.first = e
	}
}

// walk follows the packets for a slot through the entries of a hook.
type walk struct {
	space    region.Space
	left     taken                  // the nat chains: translated or dropped
	returned map[*activation]*taken // the chain entered by the activation
	accepted map[*activation]*taken // the base chain of the root
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
			s.Certain, s.doubt = nil, "too many rules come before it"
		}
		w.take(e, s.Bounds)
		out = append(out, s)
	}
	return out
}

// share returns what is left of box for e.
func (w *walk) share(e *entry, box region.Box) share {
	s := share{entry: e, Bounds: region.Exactly(region.Of(box))}
	if s.Possible.Empty() {
		return s
	}
	subtract := func(t *taken) {
		if t == nil || s.Possible.Empty() {
			return
		}
		before := len(s.Certain) > 0
		s.Bounds = w.space.Without(s.Bounds, t.Bounds)
		if before && s.Certain.Empty() && t.first != nil && s.doubt == "" {
			s.doubt = "may be decided by an earlier rule that is not understood: " + t.first.rule.text()
		}
	}
	subtract(&w.left)
	if len(w.accepted) > 0 {
		subtract(w.accepted[e.act.root])
	}
	for a := e.act; a != nil && len(w.returned) > 0; a = a.parent {
		if a.parent == nil && e.isPolicy() {
			break // a packet that returns from a base chain meets its policy
		}
		subtract(w.returned[a])
	}
	if s.Certain.Empty() && s.doubt == "" {
		s.doubt = "too many rules that overlap come before it"
	}
	return s
}

// isPolicy reports whether e is the policy of a base chain.
func (e *entry) isPolicy() bool { return e.rule.raw == nil && e.rule.pos == policyPosition }

// take notes what e takes of its share.
func (w *walk) take(e *entry, b region.Bounds) {
	switch {
	case e.m.marked, e.m.maybe:
		return // no new connection meets it; it leaves some of each kind
	case len(e.m.opaque) > 0:
		b.Certain = nil
	}
	switch e.end.kind {
	case endReturn:
		scoped(&w.returned, e.act).add(e, b)
	case endAccept:
		scoped(&w.accepted, e.act.root).add(e, b)
	default:
		w.left.add(e, b)
	}
}

// scoped returns what was taken of the chain that a entered.
func scoped(m *map[*activation]*taken, a *activation) *taken {
	if *m == nil {
		*m = make(map[*activation]*taken)
	}
	if (*m)[a] == nil {
		(*m)[a] = &taken{}
	}
	return (*m)[a]
}
