// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

func (c *Compiler) publish() port.Change {
	c.index.spread()
	var ch port.Change
	for id := range c.index.dirtySlots {
		now := c.slotBindings(id)
		was := c.published[id]
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
			c.published[id] = now
		} else {
			delete(c.published, id)
		}
	}
	if len(c.index.dirtySlots) > shrinkFrom {
		c.index.dirtySlots = make(map[slotID]struct{})
	}
	clear(c.index.dirtySlots)
	c.shrink()
	slices.SortFunc(ch.Put, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	slices.SortFunc(ch.Drop, func(a, b port.Origin) int { return cmp.Compare(a.ID, b.ID) })
	return ch
}

func sameBinding(a, b port.Binding) bool {
	return a.Origin == b.Origin && a.Key == b.Key && a.Withheld == b.Withheld && a.Inner == b.Inner && a.Maker == b.Maker && a.Doubt == b.Doubt && a.Rule == b.Rule && a.Detail.Equal(b.Detail) &&
		slices.Equal(a.Dial, b.Dial) && a.Hints.Equal(b.Hints)
}

// Incomplete reports whether the last commit needed a set whose elements were not
// read, because no packet could get there before.
func (c *Compiler) Incomplete() bool { return c.missing }

// Counts returns how many bindings there are, and how many rules were evaluated
// since the start.
func (c *Compiler) Counts() (bindings, evaluated int) { return c.count, c.evals }

// Bindings returns everything that is published, sorted by origin.
func (c *Compiler) Bindings() []port.Binding {
	out := []port.Binding{}
	for _, b := range c.published {
		out = append(out, b...)
	}
	slices.SortFunc(out, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	return out
}
