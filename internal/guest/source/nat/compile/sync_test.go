// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

// What differs from a dump is counted and named, but not what no packet meets.
func TestDifferencesAreNamed(t *testing.T) {
	all := func(ruleset.TableID) bool { return true }
	uses := ruleset.Rule{Handle: 1, Raw: natrules.Join(natrules.TCP(), natrules.Payload(2, 2, 2, 1), natrules.Lookup("ports", 1, -1), natrules.DNAT("10.0.0.1", 80))}
	set := func(name string, ports ...uint16) *ruleset.Set {
		s := &ruleset.Set{Name: name, KeyLen: 2, Elements: make(map[string]ruleset.Element)}
		for _, p := range ports {
			e := ruleset.Element{Key: natrules.Port(p)}
			s.Elements[e.ID()] = e
		}
		return s
	}
	table := func(name string, handles ...uint64) *ruleset.Table {
		tb := &ruleset.Table{ID: ruleset.TableID{Family: ruleset.FamilyIP, Name: name}, Chains: natrules.BaseChains()[:1]}
		tb.Chains[0].Rules = append(tb.Chains[0].Rules, uses)
		for _, h := range handles {
			tb.Chains[0].Rules = append(tb.Chains[0].Rules, ruleset.Rule{Handle: h, Raw: natrules.Join(natrules.TCP())})
		}
		return tb
	}
	old, now := table("a", 2, 3, 4), table("a", 2, 4, 3)
	old.Sets = []*ruleset.Set{set("ports", 80, 81), set("idle", 80)}
	now.Sets = []*ruleset.Set{set("ports", 80, 82), set("idle", 81)}
	now.Chains = append(now.Chains, &ruleset.Chain{Name: "late"})
	c := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{old, table("b")}})
	got := c.Sync(&ruleset.Snapshot{Tables: []*ruleset.Table{now}}, all)
	slices.Sort(got.First)
	want := Differences{Count: 6, First: []string{
		"chain late of table ip a: new",
		"element 0051 of set ports of table ip a: gone",
		"element 0052 of set ports of table ip a: new or changed",
		"rule 3 of chain pre of table ip a: gone, or at another place",
		"rule 3 of chain pre of table ip a: new, or at another place",
		"table ip b: gone",
	}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	if got := c.Sync(&ruleset.Snapshot{Tables: []*ruleset.Table{table("a", 10, 11, 12, 13, 14, 15, 16, 17, 18, 19)}}, all); got.Count < 10 || len(got.First) != maxFirst {
		t.Errorf("%d differences, %d named, want many and %d", got.Count, len(got.First), maxFirst)
	}
}

// What a dump does not say about a set is not known after it, though a rule read the set before:
// what changed meanwhile was not notified.
func TestSetThatADumpLeavesOutIsNotKnown(t *testing.T) {
	reads := ruleset.Rule{Handle: 1, Raw: natrules.Join(
		natrules.TCP(), natrules.Payload(2, 2, 2, 1), natrules.Lookup("ports", 1, -1), natrules.DNAT("10.0.0.1", 80))}
	snapshot := func(read bool, numbers ...uint16) *ruleset.Snapshot {
		set := &ruleset.Set{Name: "ports", Handle: 9, KeyLen: 2, Blank: !read, Elements: make(map[string]ruleset.Element)}
		tb := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains(), Sets: []*ruleset.Set{set}}
		for _, n := range numbers {
			e := ruleset.Element{Key: natrules.Port(n)}
			set.Elements[e.ID()] = e
		}
		if read {
			tb.Chains[0].Rules = []ruleset.Rule{reads}
		}
		return &ruleset.Snapshot{Tables: []*ruleset.Table{tb}}
	}
	c := compiled(snapshot(true, 80))
	m := NewMirror(c)
	m.Load(snapshot(false)) // 443 was added to the set since
	add := &ruleset.Message{Type: ruleset.MsgNewRule, Append: true, Table: natrules.Table, Chain: "pre", Handle: 2, Raw: reads.Raw}
	if err := m.Commit([]*ruleset.Message{add}, 1); err != nil {
		t.Fatal(err)
	}
	if c.Commit(); !c.Incomplete() {
		t.Error("the elements of before the dump decide")
	}
	m.Load(snapshot(true, 80, 443))
	if c.Commit(); c.Incomplete() || len(c.Bindings()) != 2 {
		t.Errorf("incomplete %v, %d bindings, want 2", c.Incomplete(), len(c.Bindings()))
	}
}
