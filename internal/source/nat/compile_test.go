// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/port"
)

func compiled(s *snapshot) *compiler {
	c := newCompiler(4096)
	c.setHost(testHost())
	c.sync(s, func(id tableID) bool { return true })
	c.commit()
	return c
}

func summary(bs []port.Binding) []string {
	out := []string{}
	for _, b := range bs {
		s := b.Key.String()
		for _, d := range b.Dial {
			s += " " + d.String()
		}
		if b.Withheld != "" {
			s += " (" + b.Withheld + ")"
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

func (g *generator) rule(level int) ruleSnap {
	g.handle++
	pick := func(a ...[]byte) []byte { return a[g.r.IntN(len(a))] }
	cond := xTCP()
	switch g.r.IntN(5) {
	case 0:
		cond = join(cond, xDport(uint16(80+g.r.IntN(6))))
	case 1, 2:
		cond = join(cond, xDport(uint16(80+g.r.IntN(6))), pick(nil, xDaddr("192.0.2.2"), xDaddr("127.0.0.1"), xIif("docker0", cmpEq), xIif("docker0", cmpNeq)))
	case 3:
		cond = join(cond, xPayload(2, 2, 2, 1), xLookup("ports", 1, -1))
	}
	var end []byte
	switch n := g.r.IntN(12); {
	case n < 5:
		end = xDNAT(fmt.Sprintf("10.0.0.%d", g.r.IntN(4)), uint16(8000+g.r.IntN(3)))
	case n < 7 && level < 2:
		end = xVerdict(vJump, fmt.Sprintf("c%d%d", level+1, g.r.IntN(2)))
	case n < 8 && level < 2:
		end = xVerdict(vGoto, fmt.Sprintf("c%d%d", level+1, g.r.IntN(2)))
	case n < 9:
		end = xVerdict(vReturn, "")
	case n < 10:
		end = xVerdict(vAccept, "")
	case level < 2:
		cond, end = xTCP(), join(xPayload(2, 2, 2, 1), xLookup(fmt.Sprintf("verdicts%d", level+1), 1, 0))
	default:
		end = rawExpr("counter")
	}
	return ruleSnap{handle: g.handle, raw: join(cond, end)}
}

func (g *generator) snapshot() *snapshot {
	t := &tableSnap{id: natTable, chains: baseChains(), dormant: g.r.IntN(20) == 0}
	for level := 1; level <= 2; level++ {
		for i := range 2 {
			t.chains = append(t.chains, &chainSnap{name: fmt.Sprintf("c%d%d", level, i)})
		}
		v := &nset{name: fmt.Sprintf("verdicts%d", level), flags: setMap, keyLen: 2, dataType: verdictData, elems: map[string]element{}}
		t.sets = append(t.sets, v)
	}
	t.sets = append(t.sets, &nset{name: "ports", keyLen: 2, elems: map[string]element{}})
	g.mutate(t, 12)
	return &snapshot{tables: []*tableSnap{t}}
}

// mutate changes n things of t.
func (g *generator) mutate(t *tableSnap, n int) {
	for range n {
		i := g.r.IntN(len(t.chains))
		c := t.chains[i]
		level := 0
		if strings.HasPrefix(c.name, "c") {
			level = int(c.name[1] - '0')
		}
		switch k := g.r.IntN(10); {
		case k < 5:
			c.rules = slices.Insert(c.rules, g.r.IntN(len(c.rules)+1), g.rule(level))
		case k < 7 && len(c.rules) > 0:
			at := g.r.IntN(len(c.rules))
			c.rules = slices.Delete(c.rules, at, at+1)
		default:
			s := t.sets[g.r.IntN(len(t.sets))]
			e := element{key: be16(uint16(80 + g.r.IntN(6)))}
			if s.flags&setMap != 0 {
				e.verdict = &verdict{code: vJump - int32(g.r.IntN(2)), chain: fmt.Sprintf("c%s%d", s.name[len(s.name)-1:], g.r.IntN(2))}
			}
			if _, ok := s.elems[e.id()]; ok && g.r.IntN(2) == 0 {
				delete(s.elems, e.id())
			} else {
				s.elems[e.id()] = e
			}
		}
	}
}

func (t *tableSnap) clone() *tableSnap {
	u := &tableSnap{id: t.id, dormant: t.dormant}
	for _, c := range t.chains {
		u.chains = append(u.chains, &chainSnap{name: c.name, hook: c.hook, rules: slices.Clone(c.rules)})
	}
	for _, s := range t.sets {
		n := *s
		n.elems = map[string]element{}
		for k, e := range s.elems {
			n.elems[k] = e
		}
		u.sets = append(u.sets, &n)
	}
	return u
}

// Whatever changes, a compiler that follows says what a fresh one says, and the
// changes that it hands out add up to that.
func TestIncrementalEqualsFresh(t *testing.T) {
	for seed := range uint64(150) {
		g := &generator{r: rand.New(rand.NewPCG(seed, 7))}
		s := g.snapshot()
		c := newCompiler(4096)
		c.setHost(testHost())
		fed := map[string]port.Binding{}
		for step := range 25 {
			c.sync(s, func(tableID) bool { return true })
			ch := c.commit()
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
			if d := cmp.Diff(summary(want.bindings()), summary(all)); d != "" {
				t.Fatalf("seed %d step %d (-fresh +followed):\n%s", seed, step, d)
			}
			wantBad, _ := want.problems(100)
			gotBad, _ := c.problems(100)
			if d := cmp.Diff(wantBad, gotBad); d != "" {
				t.Fatalf("seed %d step %d problems (-fresh +followed):\n%s", seed, step, d)
			}
			next := s.tables[0].clone()
			g.mutate(next, 1+g.r.IntN(4))
			s = &snapshot{tables: []*tableSnap{next}}
			if g.r.IntN(15) == 0 {
				s.tables = nil
				c.sync(s, func(tableID) bool { return true })
				s = &snapshot{tables: []*tableSnap{next}}
			}
		}
		if t.Failed() {
			return
		}
		c.sync(&snapshot{}, func(tableID) bool { return true })
		c.commit()
		if n := len(c.slots) + len(c.published) + len(c.bad) + len(c.callers) + len(c.tables); n != 0 {
			t.Fatalf("seed %d: %d things are left of an empty ruleset", seed, n)
		}
		for id, w := range c.wide {
			if len(w) != 0 {
				t.Fatalf("seed %d: %v keeps %d entries", seed, id, len(w))
			}
		}
	}
}

func bigSnapshot(n int) *snapshot {
	t := &tableSnap{id: natTable, chains: baseChains()}
	docker := &chainSnap{name: "DOCKER"}
	for _, c := range t.chains {
		c.rules = []ruleSnap{{handle: 1, raw: xVerdict(vJump, "DOCKER")}}
	}
	for i := range n {
		docker.rules = append(docker.rules, ruleSnap{handle: uint64(10 + i), raw: join(xTCP(), xIif("docker0", cmpNeq), xDport(uint16(1000+i)), xDNAT("172.17.0.2", 80))})
	}
	t.chains = append(t.chains, docker)
	return &snapshot{tables: []*tableSnap{t}}
}

// A change of one rule among 10,000 works out one rule.
func TestChangeIsNotAWalk(t *testing.T) {
	c := compiled(bigSnapshot(10_000))
	if n := len(c.bindings()); n != 10_000 {
		t.Fatalf("%d bindings", n)
	}
	before := c.evals
	ch := c.tables[natTable].chains["DOCKER"]
	c.insertRule(ch, len(ch.rules), 99_999, join(xTCP(), xDport(80), xDNAT("172.17.0.9", 80)))
	change := c.commit()
	if len(change.Put) != 1 || len(change.Drop) != 0 || c.evals-before > 2 {
		t.Errorf("put %d, dropped %d, evaluated %d rules", len(change.Put), len(change.Drop), c.evals-before)
	}
	c.removeRule(ch.index[500])
	change = c.commit()
	if len(change.Put) != 0 || len(change.Drop) != 1 || c.evals-before > 2 {
		t.Errorf("put %d, dropped %d, evaluated %d rules", len(change.Put), len(change.Drop), c.evals-before)
	}
}

// So does a change of one element of a verdict map.
func TestElementIsNotAWalk(t *testing.T) {
	tb := &tableSnap{id: natTable, chains: baseChains()}
	v := &nset{name: "v", flags: setMap, keyLen: 2, dataType: verdictData, elems: map[string]element{}}
	tb.sets = []*nset{v}
	tb.chains[0].rules = []ruleSnap{{handle: 1, raw: join(xTCP(), xPayload(2, 2, 2, 1), xLookup("v", 1, 0))}}
	for i := range 5000 {
		name := fmt.Sprintf("svc%d", i)
		tb.chains = append(tb.chains, &chainSnap{name: name, rules: []ruleSnap{{handle: uint64(10 + i), raw: join(xTCP(), xDNAT("10.0.0.1", 80))}}})
		e := element{key: be16(uint16(1000 + i)), verdict: &verdict{vGoto, name}}
		v.elems[e.id()] = e
	}
	c := compiled(&snapshot{tables: []*tableSnap{tb}})
	if n := len(c.bindings()); n != 5000 {
		t.Fatalf("%d bindings", n)
	}
	before := c.evals
	set := c.tables[natTable].sets["v"]
	c.dropElem(set, element{key: be16(1007)}.id())
	c.putElem(set, element{key: be16(1008), verdict: &verdict{vGoto, "svc9"}})
	change := c.commit()
	if len(change.Drop) != 1 || len(change.Put) != 1 && len(change.Put) != 0 || c.evals-before > 2 {
		t.Errorf("put %d, dropped %d, evaluated %d", len(change.Put), len(change.Drop), c.evals-before)
	}
}

// What the output hook alone sends on is for the guest's own programs, until a
// rule that nothing limits does the same for others.
func TestRulesOfTheOutputHookAloneAreInner(t *testing.T) {
	rule := func(p uint16) []byte { return join(xTCP(), xDport(p), xDNAT("10.0.0.1", 80)) }
	tb := &tableSnap{id: natTable, chains: baseChains()}
	tb.chains[0].rules = []ruleSnap{
		{handle: 1, raw: rule(80)},
		{handle: 2, raw: join(xIif("docker0", cmpEq), rule(82))},
	}
	tb.chains[1].rules = []ruleSnap{{handle: 3, raw: rule(80)}, {handle: 4, raw: rule(81)}, {handle: 5, raw: rule(82)}}
	c := compiled(&snapshot{tables: []*tableSnap{tb}})
	got := map[uint16]bool{}
	for _, b := range c.bindings() {
		got[b.Port] = b.Inner
	}
	if want := map[uint16]bool{80: false, 81: true, 82: true}; !cmp.Equal(got, want) {
		t.Errorf("inner: %v, want %v", got, want)
	}
	m := mirror{c: c, gen: 1}
	if err := m.commit([]*message{{typ: msgNewRule, table: natTable, chain: "pre", append: true, handle: 9, raw: rule(81)}}, 2); err != nil {
		t.Fatal(err)
	}
	if ch := c.commit(); len(ch.Put) != 1 || ch.Put[0].Port != 81 || ch.Put[0].Inner {
		t.Errorf("put %+v", ch.Put)
	}
}

// Emptying and refilling a table in one commit changes nothing.
func TestRefill(t *testing.T) {
	s := bigSnapshot(2000)
	c := compiled(s)
	m := mirror{c: c, others: map[tableID]struct{}{}, fresh: map[tableID]struct{}{}, gen: 1}
	msgs := []*message{{typ: msgDelTable, table: natTable}, {typ: msgNewTable, table: natTable}}
	for _, ch := range s.tables[0].chains {
		msgs = append(msgs, &message{typ: msgNewChain, table: natTable, chain: ch.name, hook: ch.hook})
	}
	for _, ch := range s.tables[0].chains {
		for _, r := range ch.rules {
			msgs = append(msgs, &message{typ: msgNewRule, table: natTable, chain: ch.name, append: true, handle: r.handle + 50_000, raw: r.raw})
		}
	}
	if err := m.commit(msgs, 2); err != nil {
		t.Fatal(err)
	}
	if ch := c.commit(); len(ch.Put)+len(ch.Drop) != 0 {
		t.Errorf("put %d, dropped %d", len(ch.Put), len(ch.Drop))
	}
	// And flushing it rule by rule.
	msgs = msgs[:0]
	d := c.tables[natTable].chains["DOCKER"]
	for _, r := range d.rules {
		msgs = append(msgs, &message{typ: msgDelRule, table: natTable, chain: "DOCKER", handle: r.handle})
	}
	for i, r := range d.rules {
		msgs = append(msgs, &message{typ: msgNewRule, table: natTable, chain: "DOCKER", append: true, handle: uint64(200_000 + i), raw: r.raw})
	}
	if err := m.commit(msgs, 3); err != nil {
		t.Fatal(err)
	}
	if ch := c.commit(); len(ch.Put)+len(ch.Drop) != 0 {
		t.Errorf("put %d, dropped %d", len(ch.Put), len(ch.Drop))
	}
	if len(d.rules) != 2000 {
		t.Errorf("%d rules", len(d.rules))
	}
}

// A ruleset whose chains call each other in a circle, or that branches without
// end, ends and publishes nothing.
func TestHostile(t *testing.T) {
	tb := &tableSnap{id: natTable, chains: baseChains()}
	tb.chains[0].rules = []ruleSnap{{handle: 1, raw: xVerdict(vJump, "a")}}
	tb.chains = append(tb.chains,
		&chainSnap{name: "a", rules: []ruleSnap{{handle: 2, raw: xVerdict(vJump, "b")}, {handle: 4, raw: xVerdict(vAccept, "")}}},
		&chainSnap{name: "b", rules: []ruleSnap{{handle: 3, raw: xVerdict(vJump, "a")}}})
	c := compiled(&snapshot{tables: []*tableSnap{tb}})
	if bs := c.bindings(); len(bs) != 0 {
		t.Errorf("published %v", summary(bs))
	}
	if _, n := c.problems(10); n == 0 {
		t.Error("the loop is not named")
	}

	tb = &tableSnap{id: natTable, chains: baseChains()}
	for i := range 20 {
		ch := &chainSnap{name: fmt.Sprintf("x%d", i)}
		for j := range 4 {
			ch.rules = append(ch.rules, ruleSnap{handle: uint64(1000 + 10*i + j), raw: xVerdict(vJump, fmt.Sprintf("x%d", i+1))})
		}
		tb.chains = append(tb.chains, ch)
	}
	tb.chains = append(tb.chains, &chainSnap{name: "x20", rules: []ruleSnap{{handle: 5, raw: join(xTCP(), xDport(80), xDNAT("10.0.0.1", 80))}}})
	tb.chains[0].rules = []ruleSnap{{handle: 1, raw: xVerdict(vJump, "x0")}}
	c = compiled(&snapshot{tables: []*tableSnap{tb}})
	acts := 0
	for _, ch := range c.tables[natTable].chains {
		acts += len(ch.acts)
	}
	if acts > maxActivations*25 {
		t.Errorf("%d activations", acts)
	}
}

func TestOrderDecides(t *testing.T) {
	drop := join(xTCP(), xDport(80), xVerdict(vDrop, ""))
	fromBridge := join(xIif("docker0", cmpEq), xVerdict(vReturn, ""))
	overLoopback := xIif("lo", cmpEq)
	other := join(xTCP(), xDport(80), xDaddr("192.0.2.2"), xVerdict(vAccept, ""))
	unknown := join(xTCP(), rawExpr("mystery"), xDport(80), xVerdict(vAccept, ""))
	mark := join(rawExpr("meta", num(2, metaMark), num(1, 1)), xCmp(cmpEq, 1, binary.NativeEndian.AppendUint32(nil, 7)), xVerdict(vAccept, ""))
	dnat := join(xTCP(), xDport(80), xDNAT("10.0.0.1", 8080))
	second := join(xTCP(), xDport(80), xDNAT("10.0.0.2", 8080))
	for name, tc := range map[string]struct {
		rules [][]byte
		want  []string
	}{
		"alone":                  {[][]byte{dnat}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"dropped before":         {[][]byte{drop, dnat}, []string{}},
		"dropped after":          {[][]byte{dnat, drop}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"first wins":             {[][]byte{dnat, second}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"bridge is left out":     {[][]byte{fromBridge, dnat}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"only the loopback":      {[][]byte{join(overLoopback, dnat)}, []string{}},
		"loopback is left out":   {[][]byte{join(xIif("lo", cmpNeq), dnat)}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"loopback hides nothing": {[][]byte{join(overLoopback, unknown), join(overLoopback, drop), dnat}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"address is left out":    {[][]byte{other, dnat}, []string{"tcp 0.0.0.0:80 172.17.0.1:80 10.0.0.1:8080"}},
		"a mark changes nothing": {[][]byte{mark, dnat}, []string{"tcp 0.0.0.0:80 192.0.2.2:80 10.0.0.1:8080"}},
		"not understood before": {[][]byte{unknown, dnat}, []string{
			"tcp 0.0.0.0:80 10.0.0.1:8080 (may be decided by an earlier rule that is not understood: meta l4proto tcp [mystery] th dport 80 accept)"}},
	} {
		t.Run(name, func(t *testing.T) {
			tb := &tableSnap{id: natTable, chains: baseChains()}
			for _, ch := range tb.chains {
				for i, r := range tc.rules {
					ch.rules = append(ch.rules, ruleSnap{handle: uint64(i + 1), raw: r})
				}
			}
			if d := cmp.Diff(tc.want, summary(compiled(&snapshot{tables: []*tableSnap{tb}}).bindings())); d != "" {
				t.Error(d)
			}
		})
	}
}

func BenchmarkFirst(b *testing.B) {
	for _, n := range []int{10, 1000, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := bigSnapshot(n)
			for b.Loop() {
				compiled(s)
			}
		})
	}
}

func BenchmarkChange(b *testing.B) {
	for _, n := range []int{10, 1000, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			c := compiled(bigSnapshot(n))
			ch := c.tables[natTable].chains["DOCKER"]
			raw := join(xTCP(), xDport(80), xDNAT("172.17.0.9", 80))
			for b.Loop() {
				c.insertRule(ch, len(ch.rules), 99_999, raw)
				c.commit()
				c.removeRule(ch.rules[len(ch.rules)-1])
				c.commit()
			}
		})
	}
}
