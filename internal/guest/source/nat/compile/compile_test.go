// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

func testHost() Host {
	return Host{
		Links: map[uint32]string{1: "lo", 2: "eth0", 3: "docker0"},
		Local: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("172.17.0.1/32"),
			netip.MustParsePrefix("192.0.2.2/32"), netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("2001:db8::2/128")},
		Nodes:     []netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2"), netip.MustParseAddr("172.17.0.1")},
		Reachable: 2,
		Uplinks:   [2][]string{{"eth0"}, {"eth0"}},
		Loopback:  []string{"lo"},
	}
}

func compiled(s *ruleset.Snapshot) *Compiler {
	c := New(4096)
	c.SetHost(testHost())
	c.Sync(s, func(id ruleset.TableID) bool { return true })
	c.Commit()
	return c
}

func summary(bs []port.Binding) []string {
	out := []string{}
	for _, b := range bs {
		s := b.Key.String()
		for _, d := range b.Dial {
			s += " " + d.String()
		}
		if !b.Withheld.IsZero() {
			s += " (" + b.Withheld.String() + ")"
		}
		out = append(out, s)
	}
	slices.Sort(out)
	return out
}

// generator makes random rulesets: three levels of chains, jumps and gotos,
// early accepts and returns, a verdict map, a port set.
type generator struct {
	r      *rand.Rand
	handle uint64
}

func (g *generator) rule(level int) ruleset.Rule {
	g.handle++
	pick := func(a ...[]byte) []byte { return a[g.r.IntN(len(a))] }
	cond := natrules.TCP()
	mark := natrules.Expr("meta", natrules.Num(2, ruleset.MetaMark), natrules.Num(1, 1))
	switch g.r.IntN(8) {
	case 4: // where DNAT leads
		cond = natrules.Join(cond, natrules.Dport(uint16(8000+g.r.IntN(3))), natrules.Daddr(fmt.Sprintf("10.0.0.%d", g.r.IntN(4))))
	case 5:
		if g.r.IntN(4) == 0 {
			cond = natrules.Join(mark, natrules.Cmp(ruleset.CmpEq, 1, make([]byte, 4)), cond, natrules.Dport(uint16(80+g.r.IntN(6))))
		}
	case 6:
		if g.r.IntN(6) == 0 {
			return ruleset.Rule{Handle: g.handle, Raw: natrules.Join(cond, natrules.Expr("meta", natrules.Num(2, ruleset.MetaMark), natrules.Num(3, 1)))}
		}
	case 0:
		cond = natrules.Join(cond, natrules.Dport(uint16(80+g.r.IntN(6))))
	case 1, 2:
		cond = natrules.Join(cond, natrules.Dport(uint16(80+g.r.IntN(6))), pick(nil, natrules.Daddr("192.0.2.2"), natrules.Daddr("127.0.0.1"), natrules.In("docker0", ruleset.CmpEq), natrules.In("docker0", ruleset.CmpNeq)))
	case 3:
		cond = natrules.Join(cond, natrules.Payload(2, 2, 2, 1), natrules.Lookup("ports", 1, -1))
	}
	var end []byte
	switch n := g.r.IntN(12); {
	case n < 5:
		end = natrules.DNAT(fmt.Sprintf("10.0.0.%d", g.r.IntN(4)), uint16(8000+g.r.IntN(3)))
	case n < 7 && level < 2:
		end = natrules.Verdict(ruleset.VerdictJump, fmt.Sprintf("c%d%d", level+1, g.r.IntN(2)))
	case n < 8 && level < 2:
		end = natrules.Verdict(ruleset.VerdictGoto, fmt.Sprintf("c%d%d", level+1, g.r.IntN(2)))
	case n < 9:
		end = natrules.Verdict(ruleset.VerdictReturn, "")
	case n < 10:
		end = natrules.Verdict(ruleset.VerdictAccept, "")
	case level < 2:
		cond, end = natrules.TCP(), natrules.Join(natrules.Payload(2, 2, 2, 1), natrules.Lookup(fmt.Sprintf("verdicts%d", level+1), 1, 0))
	default:
		end = natrules.Expr("counter")
	}
	return ruleset.Rule{Handle: g.handle, Raw: natrules.Join(cond, end)}
}

func (g *generator) snapshot() *ruleset.Snapshot {
	t := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains(), Dormant: g.r.IntN(20) == 0}
	for level := 1; level <= 2; level++ {
		for i := range 2 {
			t.Chains = append(t.Chains, &ruleset.Chain{Name: fmt.Sprintf("c%d%d", level, i)})
		}
		v := &ruleset.Set{Name: fmt.Sprintf("verdicts%d", level), Flags: ruleset.SetMap, KeyLen: 2, DataType: ruleset.VerdictDataType, Elements: map[string]ruleset.Element{}}
		t.Sets = append(t.Sets, v)
	}
	t.Sets = append(t.Sets, &ruleset.Set{Name: "ports", KeyLen: 2, Elements: map[string]ruleset.Element{}})
	g.mutate(t, 12)
	return &ruleset.Snapshot{Tables: []*ruleset.Table{t}}
}

// mutate changes n things of t.
func (g *generator) mutate(t *ruleset.Table, n int) {
	for range n {
		i := g.r.IntN(len(t.Chains))
		c := t.Chains[i]
		level := 0
		if strings.HasPrefix(c.Name, "c") {
			level = int(c.Name[1] - '0')
		}
		switch k := g.r.IntN(10); {
		case k < 5:
			c.Rules = slices.Insert(c.Rules, g.r.IntN(len(c.Rules)+1), g.rule(level))
		case k < 7 && len(c.Rules) > 0:
			at := g.r.IntN(len(c.Rules))
			c.Rules = slices.Delete(c.Rules, at, at+1)
		default:
			s := t.Sets[g.r.IntN(len(t.Sets))]
			e := ruleset.Element{Key: natrules.Port(uint16(80 + g.r.IntN(6)))}
			if s.Flags&ruleset.SetMap != 0 {
				e.Verdict = &ruleset.Verdict{Code: ruleset.VerdictJump - int32(g.r.IntN(2)), Chain: fmt.Sprintf("c%s%d", s.Name[len(s.Name)-1:], g.r.IntN(2))}
			}
			if _, ok := s.Elements[e.ID()]; ok && g.r.IntN(2) == 0 {
				delete(s.Elements, e.ID())
			} else {
				s.Elements[e.ID()] = e
			}
		}
	}
}

func cloneTable(t *ruleset.Table) *ruleset.Table {
	u := &ruleset.Table{ID: t.ID, Dormant: t.Dormant}
	for _, c := range t.Chains {
		u.Chains = append(u.Chains, &ruleset.Chain{Name: c.Name, Hook: c.Hook, Rules: slices.Clone(c.Rules)})
	}
	for _, s := range t.Sets {
		n := *s
		n.Elements = map[string]ruleset.Element{}
		for k, e := range s.Elements {
			n.Elements[k] = e
		}
		u.Sets = append(u.Sets, &n)
	}
	return u
}

// After any change a compiler has the bindings that a fresh one has, and the
// changes that it returned add up to all that its own have.
func TestIncrementalEqualsFresh(t *testing.T) {
	for seed := range uint64(150) {
		g := &generator{r: rand.New(rand.NewPCG(seed, 7))}
		s := g.snapshot()
		c := New(4096)
		c.SetHost(testHost())
		fed := map[string]port.Binding{}
		for step := range 25 {
			c.Sync(s, func(ruleset.TableID) bool { return true })
			ch := c.Commit()
			for _, o := range ch.Drop {
				if _, ok := fed[o.ID]; !ok {
					t.Fatalf("seed %d step %d: %s dropped, but never put", seed, step, o.ID)
				}
				delete(fed, o.ID)
			}
			for _, b := range ch.Put {
				fed[b.Origin.ID] = b
			}
			var all []port.Binding
			for _, b := range fed {
				all = append(all, b)
			}
			want := compiled(s)
			if d := cmp.Diff(summary(want.Bindings()), summary(all)); d != "" {
				t.Fatalf("seed %d step %d (-fresh +followed):\n%s", seed, step, d)
			}
			published := map[string]port.Binding{}
			for _, b := range c.Bindings() {
				published[b.Origin.ID] = b
			}
			if d := cmp.Diff(published, fed, cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{}, port.Reason{})); d != "" {
				t.Fatalf("seed %d step %d (-published +followed):\n%s", seed, step, d)
			}
			wantBad, _ := want.Problems(100)
			gotBad, _ := c.Problems(100)
			if d := cmp.Diff(wantBad, gotBad); d != "" {
				t.Fatalf("seed %d step %d problems (-fresh +followed):\n%s", seed, step, d)
			}
			next := cloneTable(s.Tables[0])
			g.mutate(next, 1+g.r.IntN(4))
			s = &ruleset.Snapshot{Tables: []*ruleset.Table{next}}
			if g.r.IntN(15) == 0 {
				s.Tables = nil
				c.Sync(s, func(ruleset.TableID) bool { return true })
				s = &ruleset.Snapshot{Tables: []*ruleset.Table{next}}
			}
		}
		if t.Failed() {
			return
		}
		c.Sync(&ruleset.Snapshot{}, func(ruleset.TableID) bool { return true })
		c.Commit()
		if n := len(c.index.remote) + len(c.markers) + len(c.testers) + len(c.index.uses) + len(c.index.dependents) + len(c.index.slots) + len(c.published) + len(c.index.bad) + len(c.callers) + len(c.tables); n != 0 {
			t.Fatalf("seed %d: %d things are left of an empty ruleset", seed, n)
		}
		for id, w := range c.index.wide {
			if len(w) != 0 {
				t.Fatalf("seed %d: %v keeps %d entries", seed, id, len(w))
			}
		}
	}
}

func bigSnapshot(n int) *ruleset.Snapshot {
	t := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()}
	docker := &ruleset.Chain{Name: "DOCKER"}
	for _, c := range t.Chains {
		c.Rules = []ruleset.Rule{{Handle: 1, Raw: natrules.Join(natrules.ToLocal(), natrules.Verdict(ruleset.VerdictJump, "DOCKER"))}}
	}
	for i := range n {
		docker.Rules = append(docker.Rules, ruleset.Rule{Handle: uint64(10 + i), Raw: natrules.Join(natrules.TCP(), natrules.In("docker0", ruleset.CmpNeq), natrules.Dport(uint16(1000+i)), natrules.DNAT("172.17.0.2", 80))})
	}
	t.Chains = append(t.Chains, docker)
	return &ruleset.Snapshot{Tables: []*ruleset.Table{t}}
}

// A change of one rule among 10,000 evaluates one rule.
func TestChangeEvaluatesOneRule(t *testing.T) {
	c := compiled(bigSnapshot(10_000))
	if n := len(c.Bindings()); n != 10_000 {
		t.Fatalf("%d bindings", n)
	}
	before := c.evals
	ch := c.tables[natrules.Table].chains["DOCKER"]
	c.insertRule(ch, len(ch.rules), 99_999, natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.DNAT("172.17.0.9", 80)))
	change := c.Commit()
	if len(change.Put) != 1 || len(change.Drop) != 0 || c.evals-before > 2 {
		t.Errorf("put %d, dropped %d, evaluated %d rules", len(change.Put), len(change.Drop), c.evals-before)
	}
	c.removeRule(ch.index[500])
	change = c.Commit()
	if len(change.Put) != 0 || len(change.Drop) != 1 || c.evals-before > 2 {
		t.Errorf("put %d, dropped %d, evaluated %d rules", len(change.Put), len(change.Drop), c.evals-before)
	}
}

// A change of one element of a verdict map evaluates one element.
func TestElementEvaluatesOneBranch(t *testing.T) {
	tb := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()}
	v := &ruleset.Set{Name: "v", Flags: ruleset.SetMap, KeyLen: 2, DataType: ruleset.VerdictDataType, Elements: map[string]ruleset.Element{}}
	tb.Sets = []*ruleset.Set{v}
	tb.Chains[0].Rules = []ruleset.Rule{{Handle: 1, Raw: natrules.Join(natrules.TCP(), natrules.Payload(2, 2, 2, 1), natrules.Lookup("v", 1, 0))}}
	for i := range 5000 {
		name := fmt.Sprintf("svc%d", i)
		tb.Chains = append(tb.Chains, &ruleset.Chain{Name: name, Rules: []ruleset.Rule{{Handle: uint64(10 + i), Raw: natrules.Join(natrules.TCP(), natrules.DNAT("10.0.0.1", 80))}}})
		e := ruleset.Element{Key: natrules.Port(uint16(1000 + i)), Verdict: &ruleset.Verdict{Code: ruleset.VerdictGoto, Chain: name}}
		v.Elements[e.ID()] = e
	}
	c := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}})
	if n := len(c.Bindings()); n != 5000 {
		t.Fatalf("%d bindings", n)
	}
	before := c.evals
	set := c.tables[natrules.Table].sets["v"]
	c.dropElem(set, ruleset.Element{Key: natrules.Port(1007)}.ID())
	c.putElem(set, ruleset.Element{Key: natrules.Port(1008), Verdict: &ruleset.Verdict{Code: ruleset.VerdictGoto, Chain: "svc9"}})
	change := c.Commit()
	if len(change.Drop) != 1 || len(change.Put) != 1 && len(change.Put) != 0 || c.evals-before > 2 {
		t.Errorf("put %d, dropped %d, evaluated %d", len(change.Put), len(change.Drop), c.evals-before)
	}
}

// What only the output hook redirects is for the guest's own programs, until a
// rule without limits does the same for others.
func TestOutputHookOnlyIsInner(t *testing.T) {
	rule := func(p uint16) []byte {
		return natrules.Join(natrules.TCP(), natrules.Dport(p), natrules.DNAT("10.0.0.1", 80))
	}
	tb := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()}
	tb.Chains[0].Rules = []ruleset.Rule{
		{Handle: 1, Raw: rule(80)},
		{Handle: 2, Raw: natrules.Join(natrules.In("docker0", ruleset.CmpEq), rule(82))},
	}
	tb.Chains[1].Rules = []ruleset.Rule{{Handle: 3, Raw: rule(80)}, {Handle: 4, Raw: rule(81)}, {Handle: 5, Raw: rule(82)}}
	c := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}})
	got := map[uint16]bool{}
	for _, b := range c.Bindings() {
		got[b.Port] = b.Inner
	}
	if want := map[uint16]bool{80: false, 81: true, 82: true}; !cmp.Equal(got, want) {
		t.Errorf("inner: %v, want %v", got, want)
	}
	m := Mirror{c: c, gen: 1}
	if err := m.Commit([]*ruleset.Message{{Type: ruleset.MsgNewRule, Table: natrules.Table, Chain: "pre", Append: true, Handle: 9, Raw: rule(81)}}, 2); err != nil {
		t.Fatal(err)
	}
	if ch := c.Commit(); len(ch.Put) != 1 || ch.Put[0].Port != 81 || ch.Put[0].Inner {
		t.Errorf("put %+v", ch.Put)
	}
}

// A table that gets its first nat chain by a later commit must be read. Nothing was lost.
func TestFirstNATChainIsNotALoss(t *testing.T) {
	for _, family := range []uint8{ruleset.FamilyIP, ruleset.FamilyIP6, ruleset.FamilyInet} {
		m := NewMirror(New(16))
		m.Load(&ruleset.Snapshot{Generation: 1})
		id := ruleset.TableID{Family: family, Name: "x"}
		if err := m.Commit([]*ruleset.Message{{Type: ruleset.MsgNewTable, Table: id, Handle: 7}}, 2); err != nil {
			t.Fatal(err)
		}
		chain := &ruleset.Message{Type: ruleset.MsgNewChain, Table: id, Chain: "pre", Hook: &ruleset.Hook{Type: "nat"}}
		if err := m.Commit([]*ruleset.Message{chain}, 3); !errors.Is(err, ErrNotRead) || errors.Is(err, errUnknown) {
			t.Errorf("%v: error %v, want %v", family, err, ErrNotRead)
		}
	}
}

// Where notifications of other tables are left out, a new table with a nat chain must be
// read, at the end of its commit; one of the last dump need not be.
func TestFilteredTables(t *testing.T) {
	pre := natrules.BaseChains()[0]
	made := func(id ruleset.TableID) []*ruleset.Message {
		return []*ruleset.Message{
			{Type: ruleset.MsgDelTable, Table: id}, {Type: ruleset.MsgNewTable, Table: id, Handle: 7},
			{Type: ruleset.MsgNewChain, Table: id, Chain: pre.Name, Hook: pre.Hook},
			{Type: ruleset.MsgNewRule, Table: id, Chain: "left out", Handle: 1},
		}
	}
	other := ruleset.TableID{Family: ruleset.FamilyIP, Name: "other"}
	for _, filtered := range []bool{true, false} {
		m := NewMirror(compiled(&ruleset.Snapshot{}))
		m.Filtered = filtered
		m.Load(&ruleset.Snapshot{Generation: 1, Tables: []*ruleset.Table{{ID: natrules.Table, Chains: natrules.BaseChains()}}})
		if err := m.Commit(made(natrules.Table)[:3], 2); err != nil {
			t.Errorf("filtered %v: a table of the dump: %v", filtered, err)
		}
		want := errUnknown
		if filtered {
			want = ErrNotRead
		}
		if err := m.Commit(made(other), 3); !errors.Is(err, want) {
			t.Errorf("filtered %v: another table: %v, want %v", filtered, err, want)
		}
		m.Load(&ruleset.Snapshot{Generation: 3, Others: []ruleset.TableID{natrules.Table, other}})
		if err := m.Commit(made(natrules.Table)[:3], 4); errors.Is(err, ErrNotRead) != filtered {
			t.Errorf("filtered %v: a table that the last dump did not have: %v", filtered, err)
		}
		m.Load(&ruleset.Snapshot{Generation: 4})
		if err := m.Commit(nil, 6); (err == nil) != filtered {
			t.Errorf("filtered %v: after a gap: %v", filtered, err)
		}
	}
}

// A table that loses its last nat chain is one of those that are not followed, and no
// difference to a dump.
func TestLastNATChainGoes(t *testing.T) {
	m := NewMirror(compiled(&ruleset.Snapshot{}))
	m.Load(&ruleset.Snapshot{Generation: 1, Tables: []*ruleset.Table{{ID: natrules.Table, Chains: natrules.BaseChains()}}})
	var gone []*ruleset.Message
	for _, c := range natrules.BaseChains() {
		gone = append(gone, &ruleset.Message{Type: ruleset.MsgDelChain, Table: natrules.Table, Chain: c.Name})
	}
	if err := m.Commit(gone, 2); err != nil {
		t.Fatal(err)
	}
	rule := &ruleset.Message{Type: ruleset.MsgNewRule, Table: natrules.Table, Chain: "other", Handle: 1}
	if err := m.Commit([]*ruleset.Message{rule}, 3); err != nil {
		t.Error(err)
	}
	if d := m.Load(&ruleset.Snapshot{Generation: 3, Others: []ruleset.TableID{natrules.Table}}); d.Count != 0 {
		t.Errorf("differences %q", d.First)
	}
}

// Emptying and refilling a table in one commit changes nothing.
func TestRefill(t *testing.T) {
	s := bigSnapshot(2000)
	c := compiled(s)
	m := Mirror{c: c, others: map[ruleset.TableID]struct{}{}, changed: map[ruleset.TableID]struct{}{}, gen: 1}
	msgs := []*ruleset.Message{{Type: ruleset.MsgDelTable, Table: natrules.Table}, {Type: ruleset.MsgNewTable, Table: natrules.Table}}
	for _, ch := range s.Tables[0].Chains {
		msgs = append(msgs, &ruleset.Message{Type: ruleset.MsgNewChain, Table: natrules.Table, Chain: ch.Name, Hook: ch.Hook})
	}
	for _, ch := range s.Tables[0].Chains {
		for _, r := range ch.Rules {
			msgs = append(msgs, &ruleset.Message{Type: ruleset.MsgNewRule, Table: natrules.Table, Chain: ch.Name, Append: true, Handle: r.Handle + 50_000, Raw: r.Raw})
		}
	}
	if err := m.Commit(msgs, 2); err != nil {
		t.Fatal(err)
	}
	if ch := c.Commit(); len(ch.Put)+len(ch.Drop) != 0 {
		t.Errorf("put %d, dropped %d", len(ch.Put), len(ch.Drop))
	}
	// And flushing it rule by rule.
	msgs = msgs[:0]
	d := c.tables[natrules.Table].chains["DOCKER"]
	for _, r := range d.rules {
		msgs = append(msgs, &ruleset.Message{Type: ruleset.MsgDelRule, Table: natrules.Table, Chain: "DOCKER", Handle: r.handle})
	}
	for i, r := range d.rules {
		msgs = append(msgs, &ruleset.Message{Type: ruleset.MsgNewRule, Table: natrules.Table, Chain: "DOCKER", Append: true, Handle: uint64(200_000 + i), Raw: r.raw})
	}
	if err := m.Commit(msgs, 3); err != nil {
		t.Fatal(err)
	}
	if ch := c.Commit(); len(ch.Put)+len(ch.Drop) != 0 {
		t.Errorf("put %d, dropped %d", len(ch.Put), len(ch.Drop))
	}
	if len(d.rules) != 2000 {
		t.Errorf("%d rules", len(d.rules))
	}
}

// Chains that jump in a loop, or that branch endlessly, are bounded and publish
// nothing.
func TestHostile(t *testing.T) {
	tb := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()}
	tb.Chains[0].Rules = []ruleset.Rule{{Handle: 1, Raw: natrules.Verdict(ruleset.VerdictJump, "a")}}
	tb.Chains = append(tb.Chains,
		&ruleset.Chain{Name: "a", Rules: []ruleset.Rule{{Handle: 2, Raw: natrules.Verdict(ruleset.VerdictJump, "b")}, {Handle: 4, Raw: natrules.Verdict(ruleset.VerdictAccept, "")}}},
		&ruleset.Chain{Name: "b", Rules: []ruleset.Rule{{Handle: 3, Raw: natrules.Verdict(ruleset.VerdictJump, "a")}}})
	c := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}})
	if bs := c.Bindings(); len(bs) != 0 {
		t.Errorf("published %v", summary(bs))
	}
	if _, n := c.Problems(10); n == 0 {
		t.Error("the loop is not named")
	}

	tb = &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()}
	for i := range 20 {
		ch := &ruleset.Chain{Name: fmt.Sprintf("x%d", i)}
		for j := range 4 {
			ch.Rules = append(ch.Rules, ruleset.Rule{Handle: uint64(1000 + 10*i + j), Raw: natrules.Verdict(ruleset.VerdictJump, fmt.Sprintf("x%d", i+1))})
		}
		tb.Chains = append(tb.Chains, ch)
	}
	tb.Chains = append(tb.Chains, &ruleset.Chain{Name: "x20", Rules: []ruleset.Rule{{Handle: 5, Raw: natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.DNAT("10.0.0.1", 80))}}})
	tb.Chains[0].Rules = []ruleset.Rule{{Handle: 1, Raw: natrules.Verdict(ruleset.VerdictJump, "x0")}}
	c = compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}})
	acts := 0
	for _, ch := range c.tables[natrules.Table].chains {
		acts += len(ch.acts)
	}
	if acts > maxActivations*25 {
		t.Errorf("%d activations", acts)
	}
}

func TestOrderDecides(t *testing.T) {
	drop := natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.Verdict(ruleset.VerdictDrop, ""))
	fromBridge := natrules.Join(natrules.In("docker0", ruleset.CmpEq), natrules.Verdict(ruleset.VerdictReturn, ""))
	overLoopback := natrules.In("lo", ruleset.CmpEq)
	other := natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.Daddr("192.0.2.2"), natrules.Verdict(ruleset.VerdictAccept, ""))
	unknown := natrules.Join(natrules.TCP(), natrules.Expr("mystery"), natrules.Dport(80), natrules.Verdict(ruleset.VerdictAccept, ""))
	mark := natrules.Join(natrules.Expr("meta", natrules.Num(2, ruleset.MetaMark), natrules.Num(1, 1)), natrules.Cmp(ruleset.CmpEq, 1, binary.NativeEndian.AppendUint32(nil, 7)), natrules.Verdict(ruleset.VerdictAccept, ""))
	dnat := natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.DNAT("10.0.0.1", 8080))
	second := natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.DNAT("10.0.0.2", 8080))
	for name, tc := range map[string]struct {
		rules [][]byte
		want  []string
	}{
		"alone":                  {[][]byte{dnat}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"dropped before":         {[][]byte{drop, dnat}, []string{}},
		"dropped after":          {[][]byte{dnat, drop}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"first wins":             {[][]byte{dnat, second}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"bridge is left out":     {[][]byte{fromBridge, dnat}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"only the loopback":      {[][]byte{natrules.Join(overLoopback, dnat)}, []string{}},
		"loopback is left out":   {[][]byte{natrules.Join(natrules.In("lo", ruleset.CmpNeq), dnat)}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"loopback hides nothing": {[][]byte{natrules.Join(overLoopback, unknown), natrules.Join(overLoopback, drop), dnat}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"address is left out":    {[][]byte{other, dnat}, []string{"tcp 172.17.0.1:80 172.17.0.1:80 10.0.0.1:8080 (leaves out every address that other machines reach)"}},
		"a mark changes nothing": {[][]byte{mark, dnat}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"not understood before": {[][]byte{unknown, dnat}, []string{
			"tcp 0.0.0.0:80 10.0.0.1:8080 (may be decided by an earlier rule that is not understood: meta l4proto tcp [mystery] th dport 80 accept)"}},
	} {
		t.Run(name, func(t *testing.T) {
			tb := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()}
			for _, ch := range tb.Chains {
				for i, r := range tc.rules {
					ch.Rules = append(ch.Rules, ruleset.Rule{Handle: uint64(i + 1), Raw: r})
				}
			}
			if d := cmp.Diff(tc.want, summary(compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}}).Bindings())); d != "" {
				t.Error(d)
			}
		})
	}
}

// A packet mark may be set by a table that is not read. What depends on it is never
// published as certain, and never left out without a word.
func TestMarkOfAnotherTableIsUncertain(t *testing.T) {
	mark := func(v uint32) []byte {
		return natrules.Join(natrules.Expr("meta", natrules.Num(2, ruleset.MetaMark), natrules.Num(1, 1)), natrules.Cmp(ruleset.CmpEq, 1, binary.NativeEndian.AppendUint32(nil, v)))
	}
	verdict := func(v int32) []byte { return natrules.Verdict(v, "") }
	a, b := natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.DNAT("10.0.0.1", 8080)), natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.DNAT("10.0.0.2", 8080))
	toA := []string{"tcp 0.0.0.0:80 10.0.0.1:8080"}
	for name, tc := range map[string]struct {
		rules [][]byte
		want  []string
		doubt string
	}{
		"another server":      {[][]byte{natrules.Join(mark(7), b), a}, toA, "an earlier rule tests the packet mark"},
		"accepted":            {[][]byte{natrules.Join(mark(7), verdict(ruleset.VerdictAccept)), a}, toA, "an earlier rule tests the packet mark"},
		"returned":            {[][]byte{natrules.Join(mark(7), verdict(ruleset.VerdictReturn)), a}, toA, "an earlier rule tests the packet mark"},
		"without a mark":      {[][]byte{natrules.Join(mark(0), a)}, toA, "it tests the packet mark"},
		"without a mark, two": {[][]byte{natrules.Join(mark(0), a), b}, toA, "it tests the packet mark"},
		"left with a mark": {[][]byte{natrules.Join(mark(0), verdict(ruleset.VerdictReturn)), a},
			[]string{"tcp 0.0.0.0:80 10.0.0.1:8080 (an earlier rule tests the packet mark, which another table may set: meta mark 0x0 return)"}, "an earlier rule tests the packet mark"},
		"after it":     {[][]byte{a, natrules.Join(mark(7), b)}, toA, ""},
		"another port": {[][]byte{natrules.Join(mark(7), natrules.TCP(), natrules.Dport(81), verdict(ruleset.VerdictAccept)), a}, toA, ""},
	} {
		t.Run(name, func(t *testing.T) {
			tb := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()[:1]}
			for i, r := range tc.rules {
				tb.Chains[0].Rules = append(tb.Chains[0].Rules, ruleset.Rule{Handle: uint64(i + 1), Raw: r})
			}
			bs := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}}).Bindings()
			if d := cmp.Diff(tc.want, summary(bs)); d != "" {
				t.Error(d)
			}
			wantDoubt(t, bs, tc.doubt)
		})
	}

	// The agent's own connection to the server may have a mark, too.
	for doubt, out := range map[string][]byte{
		"a rule of the output hook tests the packet mark": natrules.Join(mark(7), natrules.TCP(), natrules.Dport(8080), natrules.DNAT("10.0.0.9", 1)),
		"": natrules.Join(mark(7), natrules.TCP(), natrules.Dport(8081), natrules.DNAT("10.0.0.9", 1)),
	} {
		tb := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()}
		tb.Chains[0].Rules = []ruleset.Rule{{Handle: 1, Raw: a}}
		tb.Chains[1].Rules = []ruleset.Rule{{Handle: 2, Raw: out}}
		bs := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}}).Bindings()
		if d := cmp.Diff(toA, summary(bs)); d != "" {
			t.Error(d)
		}
		wantDoubt(t, bs, doubt)
	}
}

func wantDoubt(t *testing.T, bs []port.Binding, want string) {
	t.Helper()
	for _, b := range bs {
		if (b.Doubt == "") != (want == "") || !strings.Contains(b.Doubt, want) {
			t.Errorf("doubt %q, want %q", b.Doubt, want)
		}
	}
}

// Of two tables of one priority the newer one decides, also where a dump shows that
// a table was made anew with the same content.
func TestNewerTableDecides(t *testing.T) {
	table := func(name string, handle uint64, to string) *ruleset.Table {
		tb := &ruleset.Table{ID: ruleset.TableID{Family: ruleset.FamilyIP, Name: name}, Handle: handle, Chains: natrules.BaseChains()[:1]}
		tb.Chains[0].Rules = []ruleset.Rule{{Handle: 1, Raw: natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.DNAT(to, 80))}}
		return tb
	}
	b := table("b", 2, "10.0.0.2")
	c := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{table("a", 1, "10.0.0.1"), b}})
	for _, want := range []string{"tcp 0.0.0.0:80 10.0.0.2:80", "tcp 0.0.0.0:80 10.0.0.1:80"} {
		if got := summary(c.Bindings()); len(got) != 1 || got[0] != want {
			t.Errorf("bindings %q, want %q", got, want)
		}
		c.Sync(&ruleset.Snapshot{Tables: []*ruleset.Table{table("a", 3, "10.0.0.1"), b}}, func(ruleset.TableID) bool { return true })
		c.Commit()
	}
}

// Where it was not seen which of two chains of one priority was made first, the
// published rule is named as uncertain.
func TestOrderOfTablesInOneDumpIsUncertain(t *testing.T) {
	table := func(name string, handle uint64, to string) *ruleset.Table {
		tb := &ruleset.Table{ID: ruleset.TableID{Family: ruleset.FamilyIP, Name: name}, Handle: handle, Chains: natrules.BaseChains()[:1]}
		tb.Chains[0].Rules = []ruleset.Rule{{Handle: 1, Raw: natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.DNAT(to, 80))}}
		return tb
	}
	a, b := table("a", 1, "10.0.0.1"), table("b", 2, "10.0.0.2")
	all := func(ruleset.TableID) bool { return true }
	c := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{a, b}})
	bs := c.Bindings()
	if len(bs) != 1 || !strings.Contains(bs[0].Doubt, "the other is in table ip a") {
		t.Errorf("of one dump: %+v", bs)
	}
	c = compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{b}})
	c.Sync(&ruleset.Snapshot{Tables: []*ruleset.Table{a, b}}, all)
	c.Commit()
	bs = c.Bindings()
	if got := summary(bs); len(got) != 1 || got[0] != "tcp 0.0.0.0:80 10.0.0.1:80" || bs[0].Doubt != "" {
		t.Errorf("seen one after the other: %q, %q", got, bs[0].Doubt)
	}
}

// What only an address of the machine could meet is withheld for a family in which it
// has none but the loopback, if it has one of the other family.
func TestNoOwnAddressOfFamily(t *testing.T) {
	tb := &ruleset.Table{ID: ruleset.TableID{Family: ruleset.FamilyInet, Name: "t"}, Chains: natrules.BaseChains()[:1]}
	tb.Chains[0].Rules = []ruleset.Rule{{Handle: 1, Raw: natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.Expr("redir"))}}
	h := testHost()
	h.Nodes, h.Local, h.Reachable = h.Nodes[:1], h.Local[:4], 1 // of IPv4, and ::1
	c := New(4096)
	c.SetHost(h)
	c.Sync(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}}, func(ruleset.TableID) bool { return true })
	c.Commit()
	six := 0
	for _, b := range c.Bindings() {
		if !b.Address.Is6() {
			continue
		}
		if six++; b.Withheld != port.Because(port.NoAddress) {
			t.Errorf("%s withheld as %q", b.Key, b.Withheld)
		}
	}
	if six != 1 {
		t.Errorf("%d bindings of IPv6, want 1", six)
	}
	h.Nodes, h.Local, h.Reachable, h.Uplinks = nil, h.Local[:1], 0, [2][]string{} // it may get addresses yet
	c.SetHost(h)
	c.Commit()
	if got := summary(c.Bindings()); len(got) != 2 {
		t.Errorf("without any address: %q", got)
	}
}

// REDIRECT leads to the first address of the interface that a packet came in by.
func TestRedirectFollowsInterface(t *testing.T) {
	h := testHost()
	h.Uplinks[0] = []string{"eth0", "eth1"}
	h.Nodes, h.Reachable = append(h.Nodes, netip.MustParseAddr("198.51.100.2")), 4
	h.Local = append(h.Local, netip.MustParsePrefix("198.51.100.2/32"))
	h.Primary = map[string][2]netip.Addr{"eth0": {netip.MustParseAddr("192.0.2.2")}, "eth1": {netip.MustParseAddr("198.51.100.2")}}
	for in, want := range map[string]string{"eth0": "192.0.2.2:81", "eth1": "198.51.100.2:81"} {
		tb := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()[:1]}
		tb.Chains[0].Rules = []ruleset.Rule{{Handle: 1, Raw: natrules.Join(natrules.In(in, ruleset.CmpEq), natrules.TCP(), natrules.Dport(80),
			natrules.Immediate(1, natrules.Port(81)), natrules.Expr("redir", natrules.Num(1, 1)))}}
		c := New(4096)
		c.SetHost(h)
		c.Sync(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}}, func(ruleset.TableID) bool { return true })
		c.Commit()
		bs := c.Bindings()
		if len(bs) != 1 || len(bs[0].Dial) != 1 || bs[0].Dial[0].String() != want {
			t.Errorf("in by %s: %q, want %s", in, summary(bs), want)
		}
	}
}

// A port costs in proportion to its rules, of which there is one for each of many
// own addresses, and all of them are exact.
func TestManyOwnAddresses(t *testing.T) {
	const n = 2000
	h := testHost()
	tb := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()[:1]}
	for i := range n {
		a := netip.AddrFrom4([4]byte{198, 18, byte(i / 250), byte(i%250 + 1)})
		h.Nodes, h.Local, h.Reachable = append(h.Nodes, a), append(h.Local, netip.PrefixFrom(a, 32)), h.Reachable+1
		tb.Chains[0].Rules = append(tb.Chains[0].Rules, ruleset.Rule{Handle: uint64(i + 1),
			Raw: natrules.Join(natrules.TCP(), natrules.Daddr(a.String()), natrules.Dport(80), natrules.DNAT("10.0.0.1", 80))})
	}
	c := New(4096)
	c.SetHost(h)
	c.Sync(&ruleset.Snapshot{Tables: []*ruleset.Table{tb}}, func(ruleset.TableID) bool { return true })
	c.Commit()
	bs := c.Bindings()
	if len(bs) != n {
		t.Fatalf("%d bindings", len(bs))
	}
	for _, b := range bs {
		if !b.Withheld.IsZero() || b.Doubt != "" {
			t.Fatalf("%s: %q, %q", b.Key, b.Withheld, b.Doubt)
		}
	}
}

// Docker excludes link-local sources of IPv6, which no connection to another address has.
func TestSourcesOfThisMachine(t *testing.T) {
	local := region.Addrs(true).None()
	for _, p := range []string{"::1/128", "2001:db8::2/128", "fe80::1/128"} {
		local = region.Addrs(true).Union(local, region.Prefix(netip.MustParsePrefix(p)))
	}
	got := sources(local, true)
	for a, want := range map[string]bool{"::1": false, "2001:db8::2": true, "fe80::1": false} {
		if region.Addrs(true).Contains(got, netip.MustParseAddr(a)) != want {
			t.Errorf("%s is a source: %v, want %v", a, !want, want)
		}
	}
	if got := sources(region.Prefix(netip.MustParsePrefix("fe80::1/128")), true); !region.Addrs(true).Contains(got, netip.MustParseAddr("2001:db8::9")) {
		t.Error("with a link-local address alone, a source is known")
	}
}

func TestMain(m *testing.M) { leak.Main(m) }
