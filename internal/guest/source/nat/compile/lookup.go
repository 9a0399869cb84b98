// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"bytes"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

// item is an element with both ends of its interval.
type item struct {
	id       string
	lo, hi   []byte
	data     []byte
	verdict  *ruleset.Verdict
	catchall bool
}

// items returns the elements of n as intervals. Without only, all of them.
func (n *namedSet) items(only map[string]struct{}) []item {
	var out []item
	add := func(id string, e ruleset.Element, lo, hi []byte) {
		out = append(out, item{id: id, lo: lo, hi: hi, data: e.Data, verdict: e.Verdict, catchall: e.Flags&ruleset.ElemCatchall != 0})
	}
	if only != nil {
		for id := range only {
			if e, ok := n.Elements[id]; ok {
				add(id, e, e.Key, e.KeyEnd())
			}
		}
		return out
	}
	if n.Flags&ruleset.SetInterval == 0 || n.Concat() {
		for id, e := range n.Elements {
			add(id, e, e.Key, e.KeyEnd())
		}
		return out
	}
	list := make([]string, 0, len(n.Elements))
	for id, e := range n.Elements {
		if e.Flags&ruleset.ElemCatchall != 0 {
			add(id, e, nil, nil)
			continue
		}
		list = append(list, id)
	}
	slices.SortFunc(list, func(a, b string) int {
		x, y := n.Elements[a], n.Elements[b]
		if c := bytes.Compare(x.Key, y.Key); c != 0 {
			return c
		}
		return int(y.Flags&ruleset.ElemIntervalEnd) - int(x.Flags&ruleset.ElemIntervalEnd) // an end comes first
	})
	for i, id := range list {
		e := n.Elements[id]
		if e.Flags&ruleset.ElemIntervalEnd != 0 {
			continue
		}
		hi := bytes.Repeat([]byte{0xff}, len(e.Key))
		if e.End != nil {
			hi = e.End
		} else if i+1 < len(list) {
			hi = before(n.Elements[list[i+1]].Key)
		}
		add(id, e, e.Key, hi)
	}
	return out
}

// before returns the number before the big-endian b.
func before(b []byte) []byte {
	b = bytes.Clone(b)
	for i := len(b) - 1; i >= 0; i-- {
		b[i]--
		if b[i] != 0xff {
			break
		}
	}
	return b
}

// lookup narrows s to the set's elements; a map, and a set whose key has several
// fields, leaves one state for each. With only, it does so for those elements.
func (s *state) lookup(e ruleset.Lookup, n *namedSet, only map[string]struct{}, emit func(*state, *ruleset.Verdict)) {
	if n == nil || n.Blank {
		why := "which is not known"
		if n != nil {
			why = "which is not read yet"
		}
		s.blind("@" + e.Set + ", " + why)
		emit(s, nil)
		return
	}
	var parts []piece
	for _, p := range s.read(e.Sreg, n.KeyLen) {
		parts = append(parts, s.splitPiece(p)...)
	}
	switch {
	case n.Changing():
		s.lookupChanging(e, parts)
	case e.HasDreg || len(parts) > 1 && !e.Invert:
		for _, it := range n.items(only) {
			t := *s
			t.key += it.id + ";"
			t.narrowToItem(e.Set, n, it, parts)
			if e.HasDreg && e.Dreg != 0 {
				t.store(e.Dreg, &value{kind: valConst, data: it.data, n: len(it.data)})
			}
			emit(&t, it.verdict)
		}
		return
	case len(parts) != 1:
		s.blind("!= @" + e.Set)
	default:
		s.lookupMember(e, parts[0], n.items(only))
	}
	emit(s, nil)
}

// lookupChanging looks up in a set that packets fill, as with the clients that a
// balancer remembers.
func (s *state) lookupChanging(e ruleset.Lookup, parts []piece) {
	f := fieldNone
	if len(parts) == 1 {
		f, _, _ = s.pieceField(parts[0])
	}
	if f != fieldSaddr || e.HasDreg {
		s.blind("@" + e.Set + ", whose elements come and go")
		return
	}
	if e.Invert {
		s.m.others = true
		return
	}
	s.m.maybe, s.m.clients = true, "@"+e.Set
}

// lookupMember narrows s to the members of a set, or to all others.
func (s *state) lookupMember(e ruleset.Lookup, p piece, items []item) {
	if len(items) > 0 {
		s.apply(s.uniteItems(p, items), e.Invert)
	} else if !e.Invert {
		s.m.none()
	}
}

// narrowToItem narrows s to packets with one item's key.
func (s *state) narrowToItem(set string, n *namedSet, it item, parts []piece) {
	if it.catchall {
		s.narrowToOthers(set, n, parts)
		return
	}
	for _, p := range parts {
		if p.at+p.n > len(it.lo) || p.at+p.n > len(it.hi) {
			s.blind(p.v.describe())
			continue
		}
		s.apply(s.between(p, it.lo[p.at:], it.hi[p.at:]), false)
	}
}

// narrowToOthers narrows s to packets whose key no item has, for the catch-all.
func (s *state) narrowToOthers(set string, n *namedSet, parts []piece) {
	if len(parts) != 1 {
		s.blind("the rest of @" + set)
		return
	}
	items := slices.DeleteFunc(n.items(nil), func(it item) bool { return it.catchall })
	if len(items) > 0 {
		s.apply(s.uniteItems(parts[0], items), true)
	}
}

// uniteItems is what membership of p in items means.
func (s *state) uniteItems(p piece, items []item) narrowing {
	acc := narrowing{}
	var ports []region.Span[uint16]
	var addrs []region.Span[netip.Addr]
	for i, it := range items {
		n := s.between(p, it.lo, it.hi)
		if n.why != "" {
			return n
		}
		switch {
		case n.f == fieldDport || n.f == fieldSport:
			acc.f = n.f
			ports = append(ports, region.Ports().Spans(n.ports)...)
		case n.f == fieldDaddr || n.f == fieldSaddr:
			acc.f = n.f
			addrs = append(addrs, region.Addrs(s.v6).Spans(n.addrs)...)
		case i == 0:
			acc = n
		default:
			acc = s.unite(acc, n)
		}
	}
	switch acc.f {
	case fieldDport, fieldSport:
		acc.ports = region.Ports().Of(ports)
	case fieldDaddr, fieldSaddr:
		acc.addrs = region.Addrs(s.v6).Of(addrs)
	}
	return acc
}
