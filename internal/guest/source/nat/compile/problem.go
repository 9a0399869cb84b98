// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"maps"
	"slices"
)

// Problem is a rule that leads to a DNAT or REDIRECT, or to what may be one, but is
// not published, because it is not understood.
type Problem struct {
	Where  string // table and the chain that packets come through, from hook to rule
	Rule   string // the rule's text
	Reason string
}

// ProblemsChanged reports whether what problems returns may have changed since
// this was last asked.
func (c *Compiler) ProblemsChanged() bool {
	changed := c.index.badChanged
	c.index.badChanged = false
	return changed
}

// Problems returns what is not understood, sorted, at most limit, and how many there are.
func (c *Compiler) Problems(limit int) ([]Problem, int) {
	seen := make(map[Problem]struct{})
	for e := range c.index.bad {
		d := e.detail()
		seen[Problem{Where: d.where(), Rule: d.rule(), Reason: e.problem}] = struct{}{}
	}
	out := slices.SortedFunc(maps.Keys(seen), func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Where, b.Where), cmp.Compare(a.Rule, b.Rule), cmp.Compare(a.Reason, b.Reason))
	})
	return out[:min(limit, len(out))], len(out)
}
