// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"maps"
	"slices"
)

// highWater is the most that a map has held since it was made. Go's maps keep the
// memory of what was deleted.
type highWater int

// shrinkFrom is how much a map must have held to be made anew when it is nearly empty.
const shrinkFrom = 1024

// fell notes that a map holds n now, and reports whether it should be made anew.
func (h *highWater) fell(n int) bool {
	*h = max(*h, highWater(n))
	if *h < shrinkFrom || n > int(*h)/8 {
		return false
	}
	*h = highWater(n)
	return true
}

// remade returns a copy of m that takes only the memory of what it holds.
func remade[K comparable, V any](m map[K]V) map[K]V { return maps.Collect(maps.All(m)) }

// shrink gives back the memory of what the compiler held before.
func (c *Compiler) shrink() {
	x := &c.index
	n := len(c.published) + len(c.callers) + len(c.markers) + len(c.testers) +
		len(x.slots) + len(x.remote) + len(x.bad) + len(x.uses) + len(x.dependents)
	if !c.most.fell(n) {
		return
	}
	c.shrunk = true
	c.published, c.callers, c.markers, c.testers = remade(c.published), remade(c.callers), remade(c.markers), remade(c.testers)
	x.slots, x.remote, x.bad, x.uses, x.dependents = remade(x.slots), remade(x.remote), remade(x.bad), remade(x.uses), remade(x.dependents)
	for id, wide := range x.wide {
		x.wide[id] = slices.Clone(wide)
	}
}

// Shrunk reports whether the compiler dropped most of what it held since this was
// last asked.
func (c *Compiler) Shrunk() bool {
	shrunk := c.shrunk
	c.shrunk = false
	return shrunk
}

// shrink gives back the memory of rules that the chain held before.
func (ch *chain) shrink() {
	if !ch.most.fell(len(ch.rules)) {
		return
	}
	ch.rules, ch.index = slices.Clone(ch.rules), remade(ch.index)
	for _, a := range ch.acts {
		a.kids, a.outs = remade(a.kids), remade(a.outs)
	}
}

// shrink gives back the memory of chains and sets that the table held before.
func (t *table) shrink() {
	if t.most.fell(len(t.chains) + len(t.sets)) {
		t.chains, t.byHandle, t.sets = remade(t.chains), remade(t.byHandle), remade(t.sets)
	}
}

// shrink gives back the memory of branches that r's evaluation e had before.
func (e *evaluation) shrink(r *rule) {
	if !e.most.fell(e.branches.len()) {
		return
	}
	e.branches.more = remade(e.branches.more)
	for _, a := range r.chain.acts {
		if a.kids[r] != nil {
			a.kids[r] = remade(a.kids[r])
		}
	}
}
