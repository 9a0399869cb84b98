// SPDX-License-Identifier: Apache-2.0

package region

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
)

// Set is a set of values of an ordered type. The zero value holds every value.
//
// It is kept as the values at which membership changes, in rising order: a
// value is in the set if the number of cuts that are not above it is even, or
// odd if excludedBelow is set. A complement is one bit, and every other operation is
// one merge of two sorted lists, whatever the type. Sets are immutable.
type Set[T any] struct {
	cuts          []T
	excludedBelow bool // values below the first cut are not in the set
}

// Span is a closed interval.
type Span[T any] struct{ Lo, Hi T }

// Domain has the operations on sets of one type.
type Domain[T any] struct {
	compare func(a, b T) int
	// next returns the value that follows v; ok is false for the last one.
	next func(v T) (T, bool)
	prev func(v T) T // the value before v, which is not the first
	min  T
	max  T
}

// Ports is the domain of port numbers.
func Ports() *Domain[uint16] { return &ports }

// Addrs returns the domain of IPv4 or IPv6 addresses.
func Addrs(v6 bool) *Domain[netip.Addr] {
	if v6 {
		return &addrs6
	}
	return &addrs4
}

// Names is the domain of interface names. It has no spans: see NamesText.
func Names() *Domain[string] { return &names }

// Domains have no state; they are variables because they hold functions.
var (
	ports = Domain[uint16]{
		compare: cmp.Compare[uint16],
		next:    func(v uint16) (uint16, bool) { return v + 1, v < math.MaxUint16 },
		prev:    func(v uint16) uint16 { return v - 1 },
		max:     math.MaxUint16,
	}
	addrs4 = addrDomain(netip.AddrFrom4([4]byte{}), netip.AddrFrom4([4]byte{255, 255, 255, 255}))
	addrs6 = addrDomain(netip.IPv6Unspecified(), netip.AddrFrom16([16]byte{
		255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255}))
	names = Domain[string]{
		compare: strings.Compare,
		next:    func(v string) (string, bool) { return v + "\x00", true },
	}
)

func addrDomain(lo, hi netip.Addr) Domain[netip.Addr] {
	next := func(v netip.Addr) (netip.Addr, bool) { n := v.Next(); return n, n.IsValid() }
	return Domain[netip.Addr]{compare: netip.Addr.Compare, next: next, prev: netip.Addr.Prev, min: lo, max: hi}
}

// None returns the set that holds nothing.
func (*Domain[T]) None() Set[T] { return Set[T]{excludedBelow: true} }

// One returns the set of one value.
func (d *Domain[T]) One(v T) Set[T] { return d.Range(v, v) }

// Range returns the set of the values from lo to hi, both included; nothing if hi is below lo.
func (d *Domain[T]) Range(lo, hi T) Set[T] {
	if d.compare(lo, hi) > 0 {
		return d.None()
	}
	if end, ok := d.next(hi); ok {
		return d.between(lo, end)
	}
	return d.from(lo)
}

// between returns the set of the values from lo up to, and without, end.
func (d *Domain[T]) between(lo, end T) Set[T] {
	if d.compare(lo, d.min) == 0 {
		return Set[T]{cuts: []T{end}}
	}
	return Set[T]{cuts: []T{lo, end}, excludedBelow: true}
}

func (d *Domain[T]) from(lo T) Set[T] {
	if d.compare(lo, d.min) == 0 {
		return Set[T]{}
	}
	return Set[T]{cuts: []T{lo}, excludedBelow: true}
}

// Of returns the set of what is in any of spans.
func (d *Domain[T]) Of(spans []Span[T]) Set[T] {
	spans = slices.DeleteFunc(slices.Clone(spans), func(s Span[T]) bool { return d.compare(s.Lo, s.Hi) > 0 })
	slices.SortFunc(spans, func(a, b Span[T]) int { return d.compare(a.Lo, b.Lo) })
	out := Set[T]{excludedBelow: true}
	for i := 0; i < len(spans); {
		lo, hi := spans[i].Lo, spans[i].Hi
		end, more := d.next(hi)
		for i++; i < len(spans) && (!more || d.compare(spans[i].Lo, end) <= 0); i++ {
			if d.compare(spans[i].Hi, hi) > 0 {
				hi = spans[i].Hi
				end, more = d.next(hi)
			}
		}
		if d.compare(lo, d.min) == 0 {
			out.excludedBelow = false
		} else {
			out.cuts = append(out.cuts, lo)
		}
		if more {
			out.cuts = append(out.cuts, end)
		}
	}
	return out
}

// All reports whether s holds every value.
func (s Set[T]) All() bool { return len(s.cuts) == 0 && !s.excludedBelow }

// Empty reports whether s holds nothing.
func (s Set[T]) Empty() bool { return len(s.cuts) == 0 && s.excludedBelow }

// Complement returns what s does not hold.
func (s Set[T]) Complement() Set[T] { return Set[T]{cuts: s.cuts, excludedBelow: !s.excludedBelow} }

// merge calls f for each run of values over which membership in a and in b does
// not change, with the first value of the run, until f returns false. first is
// true for the run that begins with the domain's first value.
func (d *Domain[T]) merge(a, b Set[T], f func(at T, first, inA, inB bool) bool) {
	inA, inB := !a.excludedBelow, !b.excludedBelow
	if !f(d.min, true, inA, inB) {
		return
	}
	for i, j := 0, 0; i < len(a.cuts) || j < len(b.cuts); {
		var at T
		var c int
		switch {
		case j == len(b.cuts):
			c = -1
		case i == len(a.cuts):
			c = 1
		default:
			c = d.compare(a.cuts[i], b.cuts[j])
		}
		if c <= 0 {
			at, inA = a.cuts[i], !inA
			i++
		}
		if c >= 0 {
			at, inB = b.cuts[j], !inB
			j++
		}
		if !f(at, false, inA, inB) {
			return
		}
	}
}

// Intersect returns what both hold.
func (d *Domain[T]) Intersect(a, b Set[T]) Set[T] {
	switch {
	case a.All() || b.Empty():
		return b
	case b.All() || a.Empty():
		return a
	}
	var out Set[T]
	in := false
	d.merge(a, b, func(at T, first, inA, inB bool) bool {
		switch now := inA && inB; {
		case first:
			out.excludedBelow, in = !now, now
		case now != in:
			out.cuts, in = append(out.cuts, at), now
		}
		return true
	})
	return out
}

// Union returns what either holds.
func (d *Domain[T]) Union(a, b Set[T]) Set[T] {
	return d.Intersect(a.Complement(), b.Complement()).Complement()
}

// Subtract returns what a holds and b does not.
func (d *Domain[T]) Subtract(a, b Set[T]) Set[T] { return d.Intersect(a, b.Complement()) }

// Contains reports whether v is in s.
func (d *Domain[T]) Contains(s Set[T], v T) bool {
	below, found := slices.BinarySearchFunc(s.cuts, v, d.compare)
	if found {
		below++
	}
	return (below%2 == 0) != s.excludedBelow
}

// Covers reports whether a holds everything that b holds.
func (d *Domain[T]) Covers(a, b Set[T]) bool {
	return a.All() || b.Empty() || d.Disjoint(a.Complement(), b)
}

// Disjoint reports whether no value is in both.
func (d *Domain[T]) Disjoint(a, b Set[T]) bool {
	if a.All() || b.All() {
		return a.Empty() || b.Empty()
	}
	disjoint := true
	d.merge(a, b, func(_ T, _, inA, inB bool) bool {
		disjoint = !inA || !inB
		return disjoint
	})
	return disjoint
}

// First returns the lowest value of s in span; ok is false if there is none.
func (d *Domain[T]) First(s Set[T], span Span[T]) (v T, ok bool) {
	at, found := slices.BinarySearchFunc(s.cuts, span.Lo, d.compare)
	if found {
		at++
	}
	if (at%2 == 0) != s.excludedBelow { // span begins in s
		return span.Lo, d.compare(span.Lo, span.Hi) <= 0
	}
	if at < len(s.cuts) && d.compare(s.cuts[at], span.Hi) <= 0 {
		return s.cuts[at], true
	}
	return v, false
}

// Meets reports whether a value is in both. It is for a large set a and a small
// set b, neither of names.
func (d *Domain[T]) Meets(a, b Set[T]) bool {
	lo, in := d.min, !b.excludedBelow
	meets := func(hi T) bool {
		_, ok := d.First(a, Span[T]{lo, hi})
		return in && ok
	}
	for _, at := range b.cuts {
		if in && meets(d.prev(at)) {
			return true
		}
		lo, in = at, !in
	}
	return meets(d.max)
}

// Equal reports whether both hold the same values.
func (d *Domain[T]) Equal(a, b Set[T]) bool {
	return a.excludedBelow == b.excludedBelow && slices.EqualFunc(a.cuts, b.cuts, func(x, y T) bool { return d.compare(x, y) == 0 })
}

// Spans returns s as closed intervals in rising order. It is for ports and
// addresses, not for names.
func (d *Domain[T]) Spans(s Set[T]) []Span[T] {
	var out []Span[T]
	lo, in := d.min, !s.excludedBelow
	for _, at := range s.cuts {
		if in {
			out = append(out, Span[T]{lo, d.prev(at)})
		}
		lo, in = at, !in
	}
	if in {
		out = append(out, Span[T]{lo, d.max})
	}
	return out
}

// CountPorts returns how many ports are in s.
func CountPorts(s Set[uint16]) int {
	n := 0
	for _, r := range ports.Spans(s) {
		n += int(r.Hi) - int(r.Lo) + 1
	}
	return n
}

// Most reports whether s holds more than half of all addresses of its family.
func Most(s Set[netip.Addr], v6 bool) bool {
	if len(s.cuts) == 0 {
		return !s.excludedBelow
	}
	sum := 0.0
	for _, r := range Addrs(v6).Spans(s) {
		sum += number(r.Hi) - number(r.Lo)
	}
	return sum > math.Exp2(float64(s.cuts[0].BitLen()))/2
}

func number(a netip.Addr) float64 {
	n := 0.0
	for _, b := range a.AsSlice() {
		n = n*256 + float64(b)
	}
	return n
}

// Prefix returns the addresses of p.
func Prefix(p netip.Prefix) Set[netip.Addr] {
	s := PrefixSpan(p)
	return Addrs(s.Lo.Is6()).Range(s.Lo, s.Hi)
}

// PrefixSpan returns the first and the last address of p.
func PrefixSpan(p netip.Prefix) Span[netip.Addr] {
	lo := p.Masked().Addr()
	b := lo.AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	hi, _ := netip.AddrFromSlice(b)
	return Span[netip.Addr]{lo, hi}
}

// Named returns the set of the interfaces with these names. A name that ends in
// "*" stands for all that begin so, as in nftables and iptables ("eth+"). The
// empty name stands for "no interface", as a packet has in the output hook.
func Named(list ...string) Set[string] {
	out := names.None()
	for _, n := range list {
		out = names.Union(out, named(n))
	}
	return out
}

func named(n string) Set[string] {
	prefix, ok := strings.CutSuffix(n, "*")
	switch {
	case !ok:
		return names.One(n)
	case prefix == "":
		return Set[string]{}
	}
	if end := afterPrefix(prefix); end != "" {
		return names.between(prefix, end)
	}
	return names.from(prefix)
}

// afterPrefix returns the first string after all those that begin with p, "" if
// there is none.
func afterPrefix(p string) string {
	for p != "" && p[len(p)-1] == 0xff {
		p = p[:len(p)-1]
	}
	if p == "" {
		return ""
	}
	return p[:len(p)-1] + string([]byte{p[len(p)-1] + 1})
}

// NamesText lists the interfaces of s as one would write them in a rule, with
// "all but" in front of those that are not in it where these can be listed.
func NamesText(s Set[string]) string {
	if s.All() {
		return "every interface"
	}
	if inLast := (len(s.cuts)%2 == 0) != s.excludedBelow; inLast {
		return "all but " + namesText(s.Complement())
	}
	return namesText(s)
}

// namesText lists the names of a set that ends somewhere.
func namesText(s Set[string]) string {
	cuts := s.cuts
	if !s.excludedBelow {
		cuts = append([]string{""}, cuts...)
	}
	var out []string
	for i := 0; i+1 < len(cuts); i += 2 {
		lo, end := cuts[i], cuts[i+1]
		switch {
		case lo == "" && end == "\x00":
			out = append(out, "none")
		case end == lo+"\x00":
			out = append(out, lo)
		case lo != "" && end == afterPrefix(lo):
			out = append(out, lo+"*")
		default:
			out = append(out, fmt.Sprintf("%q up to %q", lo, end))
		}
	}
	return strings.Join(out, ", ")
}
