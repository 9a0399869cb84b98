// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"slices"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// Sync makes the tables that scope accepts equal to snap, changing only what differs.
// It returns how many objects differed.
func (c *Compiler) Sync(snap *ruleset.Snapshot, scope func(ruleset.TableID) bool) int {
	c.tidy()
	c.seen++
	n := 0
	want := make(map[ruleset.TableID]*ruleset.Table)
	for _, t := range snap.Tables {
		want[t.ID] = t
	}
	for id := range c.tables {
		if scope(id) && want[id] == nil {
			c.dropTable(id)
			n++
		}
	}
	for _, ts := range snap.Tables {
		if old := c.tables[ts.ID]; old != nil && old.handle != 0 && ts.Handle != 0 && old.handle != ts.Handle {
			c.dropTable(ts.ID) // another of that name, whose chains run in another order
			n++
		}
		t := c.table(ts.ID)
		if t.dormant != ts.Dormant {
			n++
		}
		t.handle, t.owned = ts.Handle, ts.Owned
		c.setDormant(t, ts.Dormant)
		n += c.syncSets(t, ts)
		renamed := make(map[uint64]uint64) // when chains were registered, by handle
		chains := make(map[string]*ruleset.Chain)
		for _, cs := range ts.Chains {
			chains[cs.Name] = cs
		}
		for name, ch := range t.chains {
			if cs := chains[name]; cs == nil || cs.Handle != ch.handle {
				renamed[ch.handle] = ch.registered
				c.dropChain(ch)
				n++
			}
		}
		for _, cs := range ts.Chains {
			if old := t.chains[cs.Name]; old == nil || !sameHook(old.hook, cs.Hook) {
				n++
			}
			ch := c.putChain(t, cs.Name, cs.Handle, cs.Hook)
			if at, ok := renamed[cs.Handle]; ok && cs.Handle != 0 {
				ch.registered = at
			}
			n += c.syncRules(ch, cs.Rules)
		}
	}
	return n
}

func (c *Compiler) syncSets(t *table, ts *ruleset.Table) int {
	n := 0
	want := make(map[string]*ruleset.Set)
	for _, s := range ts.Sets {
		want[s.Name] = s
	}
	// Sets that no rule reads do not count: hooks report them only when one does.
	for name, have := range t.sets {
		if want[name] == nil {
			if len(have.users) > 0 {
				n++
			}
			c.dropSet(t, name)
		}
	}
	for _, s := range ts.Sets {
		elems := s.Elements
		have, _ := c.putSet(t, &ruleset.Set{Name: s.Name, Handle: s.Handle, Flags: s.Flags, KeyLen: s.KeyLen, DataLen: s.DataLen, DataType: s.DataType})
		if s.Blank || have.Changing() {
			if len(have.users) == 0 {
				have.Blank, have.Elements = s.Blank, make(map[string]ruleset.Element)
			}
			continue // what is in it does not matter
		}
		known := !have.Blank && len(have.users) > 0
		if have.Blank {
			have.Blank = false
			for r := range have.users {
				c.touch(r)
			}
		}
		differ := 0
		for id := range have.Elements {
			if _, ok := elems[id]; !ok {
				c.dropElem(have, id)
				differ++
			}
		}
		for id, e := range elems {
			if old, ok := have.Elements[id]; !ok || !old.Equal(e) {
				differ++
			}
			c.putElem(have, e)
		}
		if known {
			n += differ
		}
	}
	return n
}

func sameRule(r *rule, s ruleset.Rule) bool {
	return r.handle == s.Handle && string(r.raw) == string(s.Raw)
}

// syncRules keeps the longest equal beginning and end, and every rule between
// them whose handle and bytes stay in the same order.
func (c *Compiler) syncRules(ch *chain, want []ruleset.Rule) int {
	head := 0
	for head < len(ch.rules) && head < len(want) && sameRule(ch.rules[head], want[head]) {
		head++
	}
	tail := 0
	for tail < len(ch.rules)-head && tail < len(want)-head &&
		sameRule(ch.rules[len(ch.rules)-1-tail], want[len(want)-1-tail]) {
		tail++
	}
	oldMid := slices.Clone(ch.rules[head : len(ch.rules)-tail])
	newMid := want[head : len(want)-tail]
	if len(oldMid) == 0 && len(newMid) == 0 {
		return 0
	}
	// Pair equal rules greedily in order.
	type ident struct {
		handle uint64
		raw    string
	}
	at := make(map[ident][]int)
	for i, r := range oldMid {
		k := ident{r.handle, string(r.raw)}
		at[k] = append(at[k], i)
	}
	n := 0
	last := -1
	mid := make([]*rule, 0, len(newMid))
	kept := make([]bool, len(oldMid))
	for _, s := range newMid {
		k := ident{s.Handle, string(s.Raw)}
		found := -1
		for len(at[k]) > 0 {
			i := at[k][0]
			at[k] = at[k][1:]
			if i > last {
				found = i
				break
			}
		}
		if found >= 0 {
			last, kept[found] = found, true
			mid = append(mid, oldMid[found])
			continue
		}
		n++
		mid = append(mid, c.newRule(ch, s.Handle, s.Raw))
	}
	for i, r := range oldMid {
		if !kept[i] {
			c.forget(r)
			if ch.index[r.handle] == r {
				delete(ch.index, r.handle)
			}
			n++
		}
	}
	ch.rules = slices.Concat(ch.rules[:head:head], mid, ch.rules[len(ch.rules)-tail:])
	ch.renumber(head)
	for _, r := range mid {
		ch.learn(r)
		if r.eval == [2]*evaluation{} {
			c.touch(r)
		}
	}
	ch.shrink()
	return n
}
