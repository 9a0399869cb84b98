// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/compact"
)

// published is what is kept of a binding of a slot. A port.Binding has room for much that
// NAT rules do not have.
type published struct {
	origin   string // its id
	address  netip.Addr
	withheld port.Reason
	inner    bool
	maker    port.Maker
	rule     uint64
	dial     []netip.AddrPort
	doubt    string
	targets  []netip.AddrPort
	detail   port.Detail
}

// keep returns what to keep of bindings, which may be none.
func keep(bs []port.Binding) []published {
	out := make([]published, len(bs))
	for i := range bs {
		b := &bs[i]
		out[i] = published{
			origin: b.Origin.ID, address: b.Address, withheld: b.Withheld, inner: b.Inner, rule: b.Target, maker: b.Maker,
			dial: b.Dial, doubt: b.Doubt, targets: b.Hints.Targets, detail: b.Detail,
		}
	}
	return out
}

// binding returns the binding of a slot.
func (p *published) binding(s port.Slot) port.Binding {
	return port.Binding{
		Key:    port.Key{Protocol: s.Protocol, Address: p.address, Port: s.Port},
		Origin: port.Origin{Source: port.SourceNAT, ID: p.origin}, Withheld: p.withheld, Inner: p.inner, Target: p.rule, Maker: p.maker,
		Dial: p.dial, Doubt: p.doubt, Hints: port.Hints{Targets: p.targets}, Detail: p.detail,
	}
}

func (c *Compiler) publish() port.Change {
	c.index.spread()
	var ch port.Change
	for id := range c.index.dirtySlots {
		now := c.slotBindings(id)
		was := c.bindings(nil, id)
		for _, b := range was {
			if !slices.ContainsFunc(now, func(n port.Binding) bool { return n.Origin == b.Origin }) {
				ch.Drop = append(ch.Drop, b.Origin)
			}
		}
		for _, b := range now {
			if !slices.ContainsFunc(was, func(w port.Binding) bool { return sameBinding(w, b) }) {
				ch.Put = append(ch.Put, b)
			}
		}
		c.count += len(now) - len(was)
		if len(now) > 0 {
			c.published[id] = keep(now)
		} else {
			delete(c.published, id)
		}
	}
	c.index.dirtySlots = compact.Clear(c.index.dirtySlots)
	c.shrink()
	slices.SortFunc(ch.Put, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	slices.SortFunc(ch.Drop, func(a, b port.Origin) int { return cmp.Compare(a.ID, b.ID) })
	return ch
}

func sameBinding(a, b port.Binding) bool {
	return a.Origin == b.Origin && a.Key == b.Key && a.Withheld == b.Withheld && a.Inner == b.Inner && a.Maker == b.Maker && a.Doubt == b.Doubt && a.Target == b.Target && a.Detail.Equal(b.Detail) &&
		slices.Equal(a.Dial, b.Dial) && a.Hints.Equal(b.Hints)
}

// Incomplete reports whether the last commit needed a set whose elements were not
// read, because no packet could get there before.
func (c *Compiler) Incomplete() bool { return c.missing }

// Counts returns how many bindings there are, and how many rules were evaluated
// since the start.
func (c *Compiler) Counts() (bindings, evaluated int) { return c.count, c.evals }

// bindings appends what is published of a slot.
func (c *Compiler) bindings(out []port.Binding, id slotID) []port.Binding {
	for i := range c.published[id] {
		out = append(out, c.published[id][i].binding(id.slot))
	}
	return out
}

// Bindings returns everything that is published, sorted by origin.
func (c *Compiler) Bindings() []port.Binding {
	out := make([]port.Binding, 0, c.count)
	for id := range c.published {
		out = c.bindings(out, id)
	}
	slices.SortFunc(out, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	return out
}
