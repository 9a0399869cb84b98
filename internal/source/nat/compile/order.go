// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"slices"
)

// before orders entries of one hook as packets meet them.
func (e *entry) before(f *entry) int {
	if e.act.root != f.act.root {
		a, b := e.act.root.chain, f.act.root.chain
		legacy := func(c *chain) int {
			if c.table.id.Legacy {
				return 1
			}
			return 0
		}
		// Of one priority the kernel runs what was registered last (nf_hook_entries_grow),
		// which is what has the higher handle.
		return cmp.Or(cmp.Compare(a.hook.Priority, b.hook.Priority), cmp.Compare(legacy(a), legacy(b)),
			cmp.Compare(b.table.handle, a.table.handle), cmp.Compare(a.table.id.String(), b.table.id.String()),
			cmp.Compare(b.handle, a.handle), cmp.Compare(a.name, b.name))
	}
	var pe, pf [maxDepth + 2]int
	a, b := e.path(pe[:0]), f.path(pf[:0])
	if c := slices.Compare(a, b); c != 0 {
		// The end of a goto comes after what it leads to.
		if n := min(len(a), len(b)); slices.Equal(a[:n], b[:n]) {
			return -c
		}
		return c
	}
	if e.act == f.act {
		return cmp.Compare(e.key, f.key)
	}
	return slices.Compare(e.keys(), f.keys())
}

// keys names the branches on the way to e, to order entries that packets meet
// by choice and not in turn.
func (e *entry) keys() []string {
	out := []string{e.key}
	for a := e.act; a.parent != nil; a = a.parent {
		out = append(out, a.key)
	}
	slices.Reverse(out)
	return out
}

func (e *entry) path(p []int) []int {
	p = append(p, e.rule.pos)
	for a := e.act; a.parent != nil; a = a.parent {
		p = append(p, a.via.pos)
	}
	slices.Reverse(p)
	return p
}
