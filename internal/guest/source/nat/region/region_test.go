// SPDX-License-Identifier: Apache-2.0

package region

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// The universe is small enough to try every packet: a few values of each field,
// at the ends of the domains and in between.
var (
	universePorts = []uint16{0, 1, 2, 79, 80, 81, 65534, 65535}
	universe4     = addrList("0.0.0.0", "0.0.0.1", "10.0.0.1", "10.0.0.2", "127.0.0.1", "192.0.2.2", "255.255.255.254", "255.255.255.255")
	universe6     = addrList("::", "::1", "fd00::1", "fd00::2", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")
	universeNames = []string{"", "docker0", "docker", "eth", "eth0", "eth0.1", "eth1", "lo", "veth1"}
	patterns      = []string{"", "docker0", "docker*", "eth0", "eth*", "eth0*", "lo", "veth*", "v*"}
)

func addrList(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func pick[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

// randomSet builds a set by operations, and the same as a function of a value.
func randomSet[T any](r *rand.Rand, d *Domain[T], basic func() (Set[T], func(T) bool), depth int) (Set[T], func(T) bool) {
	if depth == 0 || r.IntN(3) == 0 {
		switch r.IntN(5) {
		case 0:
			return Set[T]{}, func(T) bool { return true }
		case 1:
			return d.None(), func(T) bool { return false }
		}
		return basic()
	}
	a, inA := randomSet(r, d, basic, depth-1)
	b, inB := randomSet(r, d, basic, depth-1)
	switch r.IntN(4) {
	case 0:
		return d.Union(a, b), func(v T) bool { return inA(v) || inB(v) }
	case 1:
		return d.Subtract(a, b), func(v T) bool { return inA(v) && !inB(v) }
	case 2:
		return a.Complement(), func(v T) bool { return !inA(v) }
	}
	return d.Intersect(a, b), func(v T) bool { return inA(v) && inB(v) }
}

func spanOf[T any](r *rand.Rand, d *Domain[T], universe []T) func() (Set[T], func(T) bool) {
	return func() (Set[T], func(T) bool) {
		lo, hi := pick(r, universe), pick(r, universe)
		return d.Range(lo, hi), func(v T) bool { return d.compare(lo, v) <= 0 && d.compare(v, hi) <= 0 }
	}
}

func nameMatches(pattern, name string) bool {
	if n := len(pattern); n > 0 && pattern[n-1] == '*' {
		return len(name) >= n-1 && name[:n-1] == pattern[:n-1]
	}
	return pattern == name
}

func patternOf(r *rand.Rand) func() (Set[string], func(string) bool) {
	return func() (Set[string], func(string) bool) {
		list := []string{pick(r, patterns), pick(r, patterns)}
		return Named(list...), func(v string) bool {
			return slices.ContainsFunc(list, func(p string) bool { return nameMatches(p, v) })
		}
	}
}

func checkSets[T any](t *testing.T, r *rand.Rand, d *Domain[T], universe []T, basic func() (Set[T], func(T) bool)) {
	t.Helper()
	for range 3000 {
		a, inA := randomSet(r, d, basic, 4)
		b, inB := randomSet(r, d, basic, 4)
		covers, disjoint := true, true
		for _, v := range universe {
			if d.Contains(a, v) != inA(v) {
				t.Fatalf("%v: Contains(%v) = %t, want %t", a, v, d.Contains(a, v), inA(v))
			}
			covers = covers && (inA(v) || !inB(v))
			disjoint = disjoint && !(inA(v) && inB(v))
		}
		// What is between the values of the universe can differ, so these are
		// checked against the algebra and against the universe in one direction.
		if got := d.Covers(a, b); got != d.Subtract(b, a).Empty() || got && !covers {
			t.Fatalf("Covers(%v, %v) = %t", a, b, got)
		}
		if got := d.Disjoint(a, b); got != d.Intersect(a, b).Empty() || got && !disjoint {
			t.Fatalf("Disjoint(%v, %v) = %t", a, b, got)
		}
		if !d.Equal(a.Complement().Complement(), a) || !d.Equal(d.Union(a, a.Complement()), Set[T]{}) || !d.Intersect(a, a.Complement()).Empty() {
			t.Fatalf("%v and its complement are not a whole", a)
		}
	}
}

func TestSetsAgainstEveryValue(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	checkSets(t, r, Ports(), universePorts, spanOf(r, Ports(), universePorts))
	checkSets(t, r, Addrs(false), universe4, spanOf(r, Addrs(false), universe4))
	checkSets(t, r, Addrs(true), universe6, spanOf(r, Addrs(true), universe6))
	checkSets(t, r, Names(), universeNames, patternOf(r))
}

func checkMeets[T comparable](t *testing.T, r *rand.Rand, d *Domain[T], universe []T) {
	t.Helper()
	for range 3000 {
		a, inA := randomSet(r, d, spanOf(r, d, universe), 4)
		b, _ := randomSet(r, d, spanOf(r, d, universe), 4)
		if got, want := d.Meets(a, b), !d.Disjoint(a, b); got != want {
			t.Fatalf("Meets(%v, %v) = %t, want %t", a, b, got, want)
		}
		span := Span[T]{pick(r, universe), pick(r, universe)}
		first, ok := d.First(a, span)
		if want := !d.Disjoint(a, d.Range(span.Lo, span.Hi)); ok != want {
			t.Fatalf("First(%v, %v): %t, want %t", a, span, ok, want)
		}
		if !ok {
			continue
		}
		if !d.Contains(a, first) || d.compare(first, span.Lo) < 0 || d.compare(first, span.Hi) > 0 {
			t.Fatalf("First(%v, %v) = %v, which is not in both", a, span, first)
		}
		for _, v := range universe {
			if inA(v) && d.compare(span.Lo, v) <= 0 && d.compare(v, first) < 0 {
				t.Fatalf("First(%v, %v) = %v, but %v is in it", a, span, first, v)
			}
		}
	}
}

func TestFirstAndMeets(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	checkMeets(t, r, Ports(), universePorts)
	checkMeets(t, r, Addrs(false), universe4)
	checkMeets(t, r, Addrs(true), universe6)
}

func TestSpans(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		s, _ := randomSet(r, Ports(), spanOf(r, Ports(), universePorts), 4)
		spans := Ports().Spans(s)
		if !Ports().Equal(Ports().Of(spans), s) {
			t.Fatalf("Of(Spans(%v)) is another set", s)
		}
		n := 0
		for v := range 1 << 16 {
			if Ports().Contains(s, uint16(v)) {
				n++
			}
		}
		if got := CountPorts(s); got != n {
			t.Fatalf("CountPorts(%v) = %d, want %d", s, got, n)
		}
		r.Shuffle(len(spans), func(i, j int) { spans[i], spans[j] = spans[j], spans[i] })
		if !Ports().Equal(Ports().Of(append(spans, spans...)), s) {
			t.Fatal("order and repetition of spans matter")
		}
	}
}

func TestMost(t *testing.T) {
	prefix := func(s string) Set[netip.Addr] { return Prefix(netip.MustParsePrefix(s)) }
	for _, c := range []struct {
		name string
		set  Set[netip.Addr]
		v6   bool
		want bool
	}{
		{"all", Set[netip.Addr]{}, false, true},
		{"none", Addrs(false).None(), false, false},
		{"a network", prefix("10.0.0.0/8"), false, false},
		{"all but a network", prefix("10.0.0.0/8").Complement(), false, true},
		{"IPv6 network", prefix("fd00::/8"), true, false},
		{"all but an IPv6 network", prefix("fd00::/8").Complement(), true, true},
	} {
		if got := Most(c.set, c.v6); got != c.want {
			t.Errorf("%s: Most = %t", c.name, got)
		}
	}
}

func TestNamesText(t *testing.T) {
	for _, c := range []struct {
		set  Set[string]
		want string
	}{
		{Set[string]{}, "every interface"},
		{Named("docker0"), "docker0"},
		{Named("eth1", "docker*"), "docker*, eth1"},
		{Named("docker0", "br-*").Complement(), "all but br-*, docker0"},
		{Named(""), "none"},
		{Names().Subtract(Named("eth*"), Named("eth0")), `"eth" up to "eth0", "eth0\x00" up to "eti"`},
	} {
		if got := NamesText(c.set); got != c.want {
			t.Errorf("NamesText = %q, want %q", got, c.want)
		}
	}
}

// packet is one packet of the universe.
type packet struct {
	protocol, from, to uint8
	dport              uint16
	daddr, saddr       netip.Addr
	in, out            string
}

func packets(v6 bool) (out []packet) {
	addrs := universe4
	if v6 {
		addrs = universe6
	}
	addrs = addrs[1:4]
	for _, protocol := range []uint8{TCP, UDP} {
		for _, ends := range [][2]uint8{{Local, Local}, {Local, Remote}, {Remote, Local}, {Remote, Remote}} {
			for _, dport := range []uint16{79, 80, 81} {
				for _, daddr := range addrs {
					for _, saddr := range addrs {
						for _, in := range []string{"", "eth0", "docker0"} {
							for _, o := range []string{"", "lo"} {
								out = append(out, packet{protocol, ends[0], ends[1], dport, daddr, saddr, in, o})
							}
						}
					}
				}
			}
		}
	}
	return out
}

func (p packet) inBox(v6 bool, b *Box) bool {
	return b.Protocols&p.protocol != 0 && b.From&p.from != 0 && b.To&p.to != 0 && Ports().Contains(b.Dport, p.dport) &&
		Addrs(v6).Contains(b.Daddr, p.daddr) && Addrs(v6).Contains(b.Saddr, p.saddr) &&
		Names().Contains(b.In, p.in) && Names().Contains(b.Out, p.out)
}

func (p packet) within(v6 bool, r Region) bool {
	return slices.ContainsFunc(r, func(b Box) bool { return p.inBox(v6, &b) })
}

func randomBox(r *rand.Rand, v6 bool) Box {
	addrs := universe4
	if v6 {
		addrs = universe6
	}
	some := func(s func()) {
		if r.IntN(2) == 0 {
			s()
		}
	}
	b := All()
	some(func() { b.Protocols = uint8(r.IntN(4)) })
	some(func() { b.From = uint8(r.IntN(4)) })
	some(func() { b.To = uint8(r.IntN(4)) })
	some(func() { b.Dport, _ = randomSet(r, Ports(), spanOf(r, Ports(), universePorts), 1) })
	some(func() { b.Daddr, _ = randomSet(r, Addrs(v6), spanOf(r, Addrs(v6), addrs), 1) })
	some(func() { b.Saddr, _ = randomSet(r, Addrs(v6), spanOf(r, Addrs(v6), addrs), 1) })
	some(func() { b.In, _ = randomSet(r, Names(), patternOf(r), 1) })
	some(func() { b.Out, _ = randomSet(r, Names(), patternOf(r), 1) })
	return b
}

func randomRegion(r *rand.Rand, sp Space) Region {
	var out Region
	for range r.IntN(4) {
		out, _ = sp.Union(out, Of(randomBox(r, sp.V6)))
	}
	return out
}

func TestRegionsAgainstEveryPacket(t *testing.T) {
	for _, sp := range []Space{{MaxBoxes: 1000}, {V6: true, MaxBoxes: 1000}} {
		all := packets(sp.V6)
		r := rand.New(rand.NewPCG(5, 6))
		for range 1500 {
			a, b := randomRegion(r, sp), randomRegion(r, sp)
			sum, ok1 := sp.Union(a, b)
			both, ok2 := sp.Intersect(a, b)
			rest, ok3 := sp.Subtract(a, b)
			if !ok1 || !ok2 || !ok3 {
				t.Fatal("more than 1,000 boxes")
			}
			for _, p := range all {
				inA, inB := p.within(sp.V6, a), p.within(sp.V6, b)
				for _, c := range []struct {
					what      string
					got, want bool
				}{
					{"union", p.within(sp.V6, sum), inA || inB},
					{"intersection", p.within(sp.V6, both), inA && inB},
					{"difference", p.within(sp.V6, rest), inA && !inB},
				} {
					if c.got != c.want {
						t.Fatalf("%+v in the %s of\n%+v\nand\n%+v: %t, want %t", p, c.what, a, b, c.got, c.want)
					}
				}
			}
			again, _ := sp.Union(rest, both)
			if !sp.Equal(again, a) {
				t.Fatalf("difference and intersection do not make up\n%+v", a)
			}
		}
	}
}

// With room for few boxes the results may be inexact, in the stated direction only.
func TestBoundsHoldWithFewBoxes(t *testing.T) {
	for limit := 1; limit <= 4; limit++ {
		sp := Space{MaxBoxes: limit}
		wide := Space{MaxBoxes: 1000}
		all := packets(false)
		r := rand.New(rand.NewPCG(7, uint64(limit)))
		for range 500 {
			a, b, c := randomRegion(r, wide), randomRegion(r, wide), randomRegion(r, wide)
			known := map[string]Bounds{
				"(a-b)-c":    sp.Without(sp.Without(Exactly(a), Exactly(b)), Exactly(c)),
				"a-(b-c)":    sp.Without(Exactly(a), sp.Without(Exactly(b), Exactly(c))),
				"(a or b)-c": sp.Without(sp.Or(Exactly(a), Exactly(b)), Exactly(c)),
			}
			for _, p := range all {
				inA, inB, inC := p.within(false, a), p.within(false, b), p.within(false, c)
				truth := map[string]bool{
					"(a-b)-c":    inA && !inB && !inC,
					"a-(b-c)":    inA && !(inB && !inC),
					"(a or b)-c": (inA || inB) && !inC,
				}
				for what, is := range truth {
					if k := known[what]; p.within(false, k.Certain) && !is || is && !p.within(false, k.Possible) {
						t.Fatalf("limit %d: %+v in %s is %t, which is outside the bounds", limit, p, what, is)
					}
				}
			}
		}
	}
}

func TestUncertainRuleTakesNothingForCertain(t *testing.T) {
	sp := Space{}
	b := All()
	b.Dport = Ports().One(80)
	left := sp.Without(Exactly(Of(All())), Bounds{Possible: Of(b)})
	if sp.OverlapsBox(left.Certain, &b) || !sp.Equal(left.Possible, Of(All())) {
		t.Errorf("after a rule that may take port 80: %+v", left)
	}
}

// The kernel allows any byte but a few in a name.
func TestNamedPrefixOfHighestBytes(t *testing.T) {
	for _, c := range []struct {
		pattern, name string
		want          bool
	}{
		{"a\xff*", "a\xff1", true}, {"a\xff*", "a", false}, {"a\xff*", "b", false},
		{"a\xfe*", "a\xff", false}, {"\xff*", "\xff\xff", true}, {"\xff*", "\xfe", false},
	} {
		if got := Names().Contains(Named(c.pattern), c.name); got != c.want {
			t.Errorf("%q in %q: %t, want %t", c.name, c.pattern, got, c.want)
		}
	}
}
