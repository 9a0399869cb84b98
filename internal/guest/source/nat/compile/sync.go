// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"encoding/hex"
	"slices"
	"strconv"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

// Differences are the objects that a model and a dump did not have alike.
type Differences struct {
	Count int
	First []string // the first of them in words, at most maxFirst
}

// maxFirst bounds Differences.First.
const maxFirst = 8

// add counts a difference of an object, which is a table, or a part of one.
// how says what the dump has.
func (d *Differences) add(how string, t ruleset.TableID, part ...string) {
	if d.Count++; d.Count > maxFirst {
		return
	}
	s := "table " + t.String()
	for i := 0; i+1 < len(part); i += 2 {
		s = part[i] + " " + part[i+1] + " of " + s
	}
	d.First = append(d.First, s+": "+how)
}

// rule is add for a rule.
func (d *Differences) rule(how string, ch *chain, handle uint64) {
	if d.Count >= maxFirst {
		d.Count++
		return
	}
	d.add(how, ch.table.id, "chain", ch.name, "rule", strconv.FormatUint(handle, 10))
}

// Sync makes the tables that scope accepts equal to snap, changing only what differs.
// It returns what differed.
func (c *Compiler) Sync(snap *ruleset.Snapshot, scope func(ruleset.TableID) bool) Differences {
	c.tidy()
	c.seen++
	var d Differences
	want := make(map[ruleset.TableID]*ruleset.Table)
	for _, t := range snap.Tables {
		want[t.ID] = t
	}
	for id := range c.tables {
		if scope(id) && want[id] == nil {
			c.dropTable(id)
			d.add("gone", id)
		}
	}
	for _, ts := range snap.Tables {
		if old := c.tables[ts.ID]; old != nil && old.handle != 0 && ts.Handle != 0 && old.handle != ts.Handle {
			c.dropTable(ts.ID) // another of that name, whose chains run in another order
			d.add("another one", ts.ID)
		}
		t := c.table(ts.ID)
		if t.dormant != ts.Dormant {
			d.add("other flags", ts.ID)
		}
		t.handle, t.owned = ts.Handle, ts.Owned
		c.setDormant(t, ts.Dormant)
		c.syncSets(t, ts, &d)
		renamed := make(map[uint64]uint64) // when chains were registered, by handle
		chains := make(map[string]*ruleset.Chain)
		for _, cs := range ts.Chains {
			chains[cs.Name] = cs
		}
		for name, ch := range t.chains {
			if cs := chains[name]; cs == nil || cs.Handle != ch.handle {
				renamed[ch.handle] = ch.registered
				c.dropChain(ch)
				d.add("gone", ts.ID, "chain", name)
			}
		}
		for _, cs := range ts.Chains {
			switch old := t.chains[cs.Name]; {
			case old == nil:
				d.add("new", ts.ID, "chain", cs.Name)
			case !sameHook(old.hook, cs.Hook):
				d.add("another hook", ts.ID, "chain", cs.Name)
			}
			ch := c.putChain(t, cs.Name, cs.Handle, cs.Hook)
			if at, ok := renamed[cs.Handle]; ok && cs.Handle != 0 {
				ch.registered = at
			}
			c.syncRules(ch, cs.Rules, &d)
		}
	}
	return d
}

func (c *Compiler) syncSets(t *table, ts *ruleset.Table, d *Differences) {
	want := make(map[string]*ruleset.Set)
	for _, s := range ts.Sets {
		want[s.Name] = s
	}
	// Sets that no rule reads do not count: they decide nothing.
	for name, have := range t.sets {
		if want[name] == nil {
			if len(have.users) > 0 {
				d.add("gone", t.id, "set", name)
			}
			c.dropSet(t, name)
		}
	}
	for _, s := range ts.Sets {
		elems := s.Elements
		have := c.putSet(t, &ruleset.Set{Name: s.Name, Handle: s.Handle, Flags: s.Flags, KeyLen: s.KeyLen, DataLen: s.DataLen, DataType: s.DataType})
		known := !have.Blank && len(have.users) > 0
		if have.Blank != s.Blank {
			// A rule that read what is blank now is one that goes, or that no packet reaches any more.
			for r := range have.users {
				c.touch(r)
			}
		}
		if have.Blank = s.Blank; s.Blank || have.Changing() { // what is in it does not matter
			delete(c.dirty.elems, have)
			have.Elements = make(map[string]ruleset.Element)
			continue
		}
		for id, old := range have.Elements {
			if _, ok := elems[id]; !ok {
				c.dropElem(have, id)
				if known {
					d.add("gone", t.id, "set", s.Name, "element", hex.EncodeToString(old.Key))
				}
			}
		}
		for id, e := range elems {
			if old, ok := have.Elements[id]; known && (!ok || !old.Equal(e)) {
				d.add("new or changed", t.id, "set", s.Name, "element", hex.EncodeToString(e.Key))
			}
			c.putElem(have, e)
		}
	}
}

func sameRule(r *rule, s ruleset.Rule) bool {
	return r.handle == s.Handle && string(r.raw) == string(s.Raw)
}

// syncRules keeps the longest equal beginning and end, and every rule between
// them whose handle and bytes stay in the same order.
func (c *Compiler) syncRules(ch *chain, want []ruleset.Rule, d *Differences) {
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
		return
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
		d.rule("new, or at another place", ch, s.Handle)
		mid = append(mid, c.newRule(ch, s.Handle, s.Raw))
	}
	for i, r := range oldMid {
		if !kept[i] {
			c.forget(r)
			if ch.index[r.handle] == r {
				delete(ch.index, r.handle)
			}
			d.rule("gone, or at another place", ch, r.handle)
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
}
