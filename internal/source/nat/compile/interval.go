// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"math"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// span is a closed interval.
type span[T any] struct{ lo, hi T }

// set is a union of disjoint spans in rising order. A nil set holds every
// value; a set that is empty and not nil holds none.
type set[T any] []span[T]

// order is what interval arithmetic needs to know of a type. next and prev are
// only called on values that are not the last or the first.
type order[T any] struct {
	cmp        func(a, b T) int
	next, prev func(T) T
	min, max   T
}

var portOrder = order[uint16]{
	cmp:  cmp.Compare[uint16],
	next: func(p uint16) uint16 { return p + 1 },
	prev: func(p uint16) uint16 { return p - 1 },
	max:  math.MaxUint16,
}

var (
	addrOrder4 = addrOrder(netip.AddrFrom4([4]byte{}), netip.AddrFrom4([4]byte{255, 255, 255, 255}))
	addrOrder6 = addrOrder(netip.IPv6Unspecified(), netip.AddrFrom16([16]byte{
		255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255}))
)

func addrOrder(lo, hi netip.Addr) order[netip.Addr] {
	return order[netip.Addr]{cmp: netip.Addr.Compare, next: netip.Addr.Next, prev: netip.Addr.Prev, min: lo, max: hi}
}

func addrOrderOf(v6 bool) *order[netip.Addr] {
	if v6 {
		return &addrOrder6
	}
	return &addrOrder4
}

func (s set[T]) all() bool   { return s == nil }
func (s set[T]) empty() bool { return s != nil && len(s) == 0 }

// normal sorts spans and joins those that touch.
func (o *order[T]) normal(in []span[T]) set[T] {
	slices.SortFunc(in, func(a, b span[T]) int { return o.cmp(a.lo, b.lo) })
	out := make(set[T], 0, len(in))
	for _, s := range in {
		if o.cmp(s.lo, s.hi) > 0 {
			continue
		}
		if n := len(out); n > 0 {
			last := &out[n-1]
			if o.cmp(s.lo, last.hi) <= 0 || o.cmp(last.hi, o.max) < 0 && o.cmp(o.next(last.hi), s.lo) == 0 {
				if o.cmp(s.hi, last.hi) > 0 {
					last.hi = s.hi
				}
				continue
			}
		}
		out = append(out, s)
	}
	if len(out) == 1 && o.cmp(out[0].lo, o.min) == 0 && o.cmp(out[0].hi, o.max) == 0 {
		return nil
	}
	return out
}

func (o *order[T]) one(v T) set[T] { return o.normal([]span[T]{{v, v}}) }

func (o *order[T]) intersect(a, b set[T]) set[T] {
	if a == nil {
		return b
	}
	if b == nil {
		return a
	}
	out := make(set[T], 0, max(len(a), len(b)))
	for i, j := 0, 0; i < len(a) && j < len(b); {
		lo, hi := a[i].lo, a[i].hi
		if o.cmp(b[j].lo, lo) > 0 {
			lo = b[j].lo
		}
		if o.cmp(b[j].hi, hi) < 0 {
			hi = b[j].hi
		}
		if o.cmp(lo, hi) <= 0 {
			out = append(out, span[T]{lo, hi})
		}
		if o.cmp(a[i].hi, b[j].hi) < 0 {
			i++
		} else {
			j++
		}
	}
	return out
}

func (o *order[T]) complement(a set[T]) set[T] {
	if a == nil {
		return set[T]{}
	}
	out := set[T]{}
	at, done := o.min, false
	for _, s := range a {
		if o.cmp(s.lo, at) > 0 {
			out = append(out, span[T]{at, o.prev(s.lo)})
		}
		if o.cmp(s.hi, o.max) == 0 {
			done = true
			break
		}
		at = o.next(s.hi)
	}
	if !done {
		out = append(out, span[T]{at, o.max})
	}
	return o.normal(out)
}

func (o *order[T]) subtract(a, b set[T]) set[T] { return o.intersect(a, o.complement(b)) }

func (o *order[T]) contains(a set[T], v T) bool {
	if a == nil {
		return true
	}
	i, _ := slices.BinarySearchFunc(a, v, func(s span[T], v T) int { return o.cmp(s.hi, v) })
	return i < len(a) && o.cmp(a[i].lo, v) <= 0
}

// covers reports whether every value of b is in a.
func (o *order[T]) covers(a, b set[T]) bool {
	if a == nil {
		return true
	}
	if b == nil {
		return false
	}
	i := 0
	for _, s := range b {
		for i < len(a) && o.cmp(a[i].hi, s.lo) < 0 {
			i++
		}
		if i == len(a) || o.cmp(a[i].lo, s.lo) > 0 || o.cmp(a[i].hi, s.hi) < 0 {
			return false
		}
	}
	return true
}

// portCount returns how many ports are in s.
func portCount(s set[uint16]) int {
	if s == nil {
		return 1 << 16
	}
	n := 0
	for _, r := range s {
		n += int(r.hi) - int(r.lo) + 1
	}
	return n
}

// mostAddrs reports whether s holds more than half of all addresses of its family.
func mostAddrs(s set[netip.Addr]) bool {
	if s == nil {
		return true
	}
	sum, whole := 0.0, 1.0
	for _, r := range s {
		w := addrNumber(r.hi) - addrNumber(r.lo)
		sum += w
		whole = math.Exp2(float64(r.lo.BitLen()))
	}
	return sum > whole/2
}

func addrNumber(a netip.Addr) float64 {
	n := 0.0
	for _, b := range a.AsSlice() {
		n = n*256 + float64(b)
	}
	return n
}

// prefixSpan returns the first and last address of p.
func prefixSpan(p netip.Prefix) span[netip.Addr] {
	r := ruleset.RangeOfPrefix(p)
	return span[netip.Addr]{r.First, r.Last}
}

// ifaces is a set of interface names. A name that ends in "*" stands for all
// that begin so. The empty name is "no interface", as a packet has in OUTPUT.
// The zero value holds every interface.
type ifaces struct {
	limited bool     // false: every interface
	not     bool     // all but names
	names   []string // sorted
}

func ifaceIn(not bool, names ...string) ifaces {
	slices.Sort(names)
	return ifaces{limited: true, not: not, names: slices.Compact(names)}
}

func namePattern(pattern, name string) bool {
	if n := len(pattern); n > 0 && pattern[n-1] == '*' {
		return len(name) >= n-1 && name[:n-1] == pattern[:n-1]
	}
	return pattern == name
}

func (f ifaces) contains(name string) bool {
	if !f.limited {
		return true
	}
	return slices.ContainsFunc(f.names, func(p string) bool { return namePattern(p, name) }) != f.not
}

func (f ifaces) empty() bool { return f.limited && !f.not && len(f.names) == 0 }

// intersect is exact for names, and for patterns that are equal, nested or disjoint.
func (f ifaces) intersect(g ifaces) ifaces {
	switch {
	case !f.limited:
		return g
	case !g.limited:
		return f
	case f.not && g.not:
		return ifaceIn(true, append(slices.Clone(f.names), g.names...)...)
	case f.not:
		f, g = g, f
		fallthrough
	case g.not:
		out := []string{}
		for _, n := range f.names {
			if !slices.ContainsFunc(g.names, func(p string) bool { return patternCovers(p, n) }) {
				out = append(out, n)
			}
		}
		return ifaceIn(false, out...)
	}
	out := []string{}
	for _, n := range f.names {
		for _, m := range g.names {
			if patternCovers(n, m) {
				out = append(out, m)
			} else if patternCovers(m, n) {
				out = append(out, n)
			}
		}
	}
	return ifaceIn(false, out...)
}

// patternCovers reports whether every name that q stands for is one that p stands for.
func patternCovers(p, q string) bool {
	if n := len(q); n > 0 && q[n-1] == '*' {
		return len(p) > 0 && p[len(p)-1] == '*' && namePattern(p, q[:n-1])
	}
	return namePattern(p, q)
}

func (f ifaces) invert() ifaces {
	if !f.limited {
		return ifaceIn(false)
	}
	f.not = !f.not
	return f
}

func (f ifaces) covers(g ifaces) bool {
	if !f.limited {
		return true
	}
	if !g.limited {
		return f.not && len(f.names) == 0
	}
	return g.intersect(f.invert()).empty()
}

func (f ifaces) disjoint(g ifaces) bool { return f.intersect(g).empty() }
