// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"slices"

	"github.com/fairlead/fairlead/internal/port/compact"
)

// shrink gives back the memory of what the compiler held before.
func (c *Compiler) shrink() {
	x := &c.index
	n := len(c.published) + len(c.callers) + len(c.markers) + len(c.testers) +
		len(x.slots) + len(x.remote) + len(x.bad) + len(x.uses) + len(x.dependents)
	if !c.most.Passed(n) {
		return
	}
	c.published, c.callers, c.markers, c.testers = compact.Map(c.published), compact.Map(c.callers), compact.Map(c.markers), compact.Map(c.testers)
	x.slots, x.remote, x.bad, x.uses, x.dependents = compact.Map(x.slots), compact.Map(x.remote), compact.Map(x.bad), compact.Map(x.uses), compact.Map(x.dependents)
	for id, wide := range x.wide {
		x.wide[id] = slices.Clone(wide)
	}
}

// shrink gives back the memory of rules that the chain held before.
func (ch *chain) shrink() {
	if !ch.most.Passed(len(ch.rules)) {
		return
	}
	ch.rules, ch.index = slices.Clone(ch.rules), compact.Map(ch.index)
	for _, a := range ch.acts {
		a.kids, a.outs = compact.Map(a.kids), compact.Map(a.outs)
	}
}

// shrink gives back the memory of chains and sets that the table held before.
func (t *table) shrink() {
	if t.most.Passed(len(t.chains) + len(t.sets)) {
		t.chains, t.byHandle, t.sets = compact.Map(t.chains), compact.Map(t.byHandle), compact.Map(t.sets)
	}
}

// shrink gives back the memory of branches that r's evaluation e had before.
func (e *evaluation) shrink(r *rule) {
	if !e.most.Passed(e.branches.len()) {
		return
	}
	e.branches.more = compact.Map(e.branches.more)
	for _, a := range r.chain.acts {
		if a.kids[r] != nil {
			a.kids[r] = compact.Map(a.kids[r])
		}
	}
}
