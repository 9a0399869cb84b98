// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"slices"
)

// before orders entries of one hook as packets meet them.
func (e *entry) before(f *entry) int {
	if e.act.root != f.act.root {
		return e.act.root.chain.before(f.act.root.chain)
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

// before orders base chains of one hook. Of one priority the kernel runs first what
// was registered last (nf_hook_entries_grow). The order of chains that were seen to
// be made is known, and within a table handles tell it. Else the newer table is taken
// to be first, and an nftables chain before a legacy one: see orderKnown.
func (c *chain) before(d *chain) int {
	legacy := func(c *chain) int {
		if c.table.id.Legacy {
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(c.hook.Priority, d.hook.Priority), cmp.Compare(legacy(c), legacy(d)),
		cmp.Compare(d.registered, c.registered),
		cmp.Compare(d.table.handle, c.table.handle), cmp.Compare(c.table.id.String(), d.table.id.String()),
		cmp.Compare(d.handle, c.handle), cmp.Compare(c.name, d.name))
}

// orderKnown reports whether it is certain which of two base chains is first.
func (c *chain) orderKnown(d *chain) bool {
	return c.table == d.table || c.hook.Priority != d.hook.Priority ||
		c.table.id.Legacy == d.table.id.Legacy && c.registered != d.registered
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
