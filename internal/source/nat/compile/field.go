// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// field is a part of the packet that can be narrowed.
type field uint8

const (
	fieldNone field = iota
	fieldProto
	fieldSport
	fieldDport
	fieldSaddr
	fieldDaddr
	fieldIif
	fieldOif
	fieldBool // answered for each value by truth
)

// pieceField names what p is a part of, and how many bytes before p belong to
// it. ok is false for what is not understood.
func (s *state) pieceField(p piece) (f field, size, before int) {
	v := p.v
	switch v.kind {
	case valPayload:
		off := v.off + p.off
		type loc struct {
			f      field
			at, sz int
		}
		var locs []loc
		switch {
		case v.key == 2: // transport header
			locs = []loc{{fieldSport, 0, 2}, {fieldDport, 2, 2}}
		case v.key == 1 && s.v6:
			locs = []loc{{fieldProto, 6, 1}, {fieldSaddr, 8, 16}, {fieldDaddr, 24, 16}}
		case v.key == 1:
			locs = []loc{{fieldProto, 9, 1}, {fieldSaddr, 12, 4}, {fieldDaddr, 16, 4}}
		}
		for _, l := range locs {
			if off >= l.at && off < l.at+l.sz {
				return l.f, l.sz, off - l.at
			}
		}
	case valMeta:
		switch v.key {
		case ruleset.MetaL4proto:
			return fieldProto, 1, p.off
		case ruleset.MetaIifname:
			return fieldIif, 16, p.off
		case ruleset.MetaOifname:
			return fieldOif, 16, p.off
		case ruleset.MetaIif, ruleset.MetaOif, ruleset.MetaNfproto, ruleset.MetaProtocol, ruleset.MetaMark:
			return fieldBool, p.n, p.off
		}
	case valCt:
		switch v.key {
		case ruleset.CtKeyProtocol:
			return fieldProto, 1, p.off
		case ruleset.CtKeyProtoDst:
			return fieldDport, 2, p.off
		case ruleset.CtKeyDst, ruleset.CtKeyDstIP, ruleset.CtKeyDstIP6:
			n := 4
			if s.v6 {
				n = 16
			}
			return fieldDaddr, n, p.off
		case ruleset.CtKeyState:
			return fieldBool, p.n, p.off
		}
	case valFib:
		return fieldBool, p.n, p.off
	}
	return fieldNone, p.n, 0
}

// splitPiece cuts p where one field ends and the next begins, as merged payload
// loads have it.
func (s *state) splitPiece(p piece) []piece {
	if p.v.kind != valPayload {
		return []piece{p}
	}
	var out []piece
	for p.n > 0 {
		f, size, before := s.pieceField(p)
		n := 1
		if f != fieldNone {
			n = min(size-before, p.n)
		}
		out = append(out, piece{v: p.v, off: p.off, n: n, at: p.at})
		p.off, p.at, p.n = p.off+n, p.at+n, p.n-n
	}
	return out
}

// narrowing is a condition on one field.
type narrowing struct {
	f     field
	ports set[uint16]
	addrs set[netip.Addr]
	proto uint8
	names []string
	truth int8   // of fieldBool: 1 yes, 0 no, -1 not known
	src   uint8  // of fieldBool about the source address
	mark  bool   // of fieldBool about the packet mark, which is taken to be 0
	why   string // not understood
}

// between works out what lo ≤ p ≤ hi means.
func (s *state) between(p piece, lo, hi []byte) narrowing {
	f, size, before := s.pieceField(p)
	bad := func() narrowing { return narrowing{why: p.v.describe()} }
	if p.v.kind == valAny {
		return narrowing{f: fieldBool, truth: -1}
	}
	if f == fieldNone || len(lo) < p.n || len(hi) < p.n {
		return bad()
	}
	lo, hi = lo[:p.n], hi[:p.n]
	eq := bytes.Equal(lo, hi)
	if f == fieldBool {
		return s.truth(p, lo, eq)
	}
	if before != 0 || p.n < size && !eq {
		return bad()
	}
	// Bytes and bits that the comparison does not see may have any value.
	full := func() (l, h []byte, ok bool) {
		l, h = make([]byte, size), make([]byte, size)
		copy(l, lo)
		copy(h, hi)
		for i := p.n; i < size; i++ {
			h[i] = 0xff
		}
		if p.v.mask != nil {
			if !eq || len(p.v.mask) < p.off+p.n || len(bytes.Trim(p.v.xor, "\x00")) != 0 {
				return nil, nil, false
			}
			gap := false
			for i := range p.n {
				m := p.v.mask[p.off+i]
				inv := ^m
				if gap && m != 0 || inv&(inv+1) != 0 || lo[i]&inv != 0 {
					return nil, nil, false
				}
				gap = gap || m != 0xff
				h[i] |= inv
			}
		}
		return l, h, true
	}
	switch f {
	case fieldIif, fieldOif:
		if !eq || p.v.mask != nil {
			return bad()
		}
		name := ruleset.CString(lo)
		if len(name) == p.n && p.n < size {
			name += "*"
		}
		return narrowing{f: f, names: []string{name}}
	}
	l, h, ok := full()
	if !ok {
		return bad()
	}
	switch f {
	case fieldProto:
		n := narrowing{f: f}
		for _, pr := range []byte{6, 17} {
			if pr >= l[0] && pr <= h[0] {
				n.proto |= protoBit(pr)
			}
		}
		return n
	case fieldSport, fieldDport:
		r := portOrder.normal([]span[uint16]{{binary.BigEndian.Uint16(l), binary.BigEndian.Uint16(h)}})
		return narrowing{f: f, ports: r}
	case fieldSaddr, fieldDaddr:
		a, _ := netip.AddrFromSlice(l)
		b, _ := netip.AddrFromSlice(h)
		return narrowing{f: f, addrs: addrOrderOf(s.v6).normal([]span[netip.Addr]{{a, b}})}
	}
	return bad()
}

// truth answers a comparison of p with b for the packets that are of interest.
func (s *state) truth(p piece, b []byte, eq bool) narrowing {
	bad := narrowing{why: p.v.describe()}
	n := narrowing{f: fieldBool}
	set := func(t bool) narrowing {
		n.truth = 0
		if t {
			n.truth = 1
		}
		return n
	}
	v := p.v
	if !eq || p.off != 0 {
		return bad
	}
	host := func() (uint32, bool) {
		if len(b) < 4 {
			return 0, false
		}
		return binary.NativeEndian.Uint32(b), true
	}
	if v.mask != nil && v.key != ruleset.MetaMark {
		return bad
	}
	switch v.kind {
	case valMeta:
		switch v.key {
		case ruleset.MetaNfproto:
			return set(b[0] == 2 && !s.v6 || b[0] == 10 && s.v6)
		case ruleset.MetaProtocol:
			if len(b) < 2 {
				return bad
			}
			e := binary.BigEndian.Uint16(b)
			return set(e == 0x0800 && !s.v6 || e == 0x86dd && s.v6)
		case ruleset.MetaIif, ruleset.MetaOif:
			i, ok := host()
			if !ok {
				return bad
			}
			n.f = fieldIif
			if v.key == ruleset.MetaOif {
				n.f = fieldOif
			}
			n.names = []string{s.env.ifname(i)}
			return n
		case ruleset.MetaMark:
			if len(b) < 4 || v.xor != nil && len(v.xor) < 4 {
				return bad
			}
			zero := make([]byte, 4)
			copy(zero, v.xor)
			n.mark = true
			return set(bytes.Equal(zero, b[:4]))
		}
	case valCt:
		st, ok := host()
		switch {
		case !ok:
			return bad
		case st&ctNew != 0:
			return set(true)
		case st&ctRelated != 0:
			n.mark = true
		}
		return set(false)
	case valFib:
		t, ok := host()
		if !ok {
			return bad
		}
		switch v.key {
		case ruleset.FibDaddr:
			return set(t == ruleset.RtnLocal)
		case ruleset.FibSaddr:
			if t != ruleset.RtnLocal {
				return bad
			}
			n.src = srcLocal
			return set(true)
		}
	}
	return bad
}

func (v *value) describe() string {
	if v.name == "" {
		return "an expression"
	}
	return v.name
}

// unite joins conditions on one field by "or".
func (s *state) unite(a, b narrowing) narrowing {
	if a.why != "" {
		return a
	}
	if b.why != "" {
		return b
	}
	if a.f != b.f || a.src != b.src {
		return narrowing{why: "a set of several kinds"}
	}
	if a.ports != nil && b.ports != nil {
		a.ports = portOrder.normal(append(slices.Clone(a.ports), b.ports...))
	} else {
		a.ports = nil
	}
	if a.addrs != nil && b.addrs != nil {
		a.addrs = addrOrderOf(s.v6).normal(append(slices.Clone(a.addrs), b.addrs...))
	} else {
		a.addrs = nil
	}
	a.proto |= b.proto
	a.names = append(slices.Clip(a.names), b.names...)
	a.truth = max(a.truth, b.truth)
	a.mark = a.mark || b.mark
	return a
}

// apply narrows s by n, or by its contrary.
func (s *state) apply(n narrowing, neg bool) {
	if n.why != "" {
		s.blind(n.why)
		return
	}
	switch n.f {
	case fieldProto:
		if neg {
			n.proto = bitsBoth &^ n.proto
		}
		s.m.proto &= n.proto
	case fieldDport:
		if neg {
			n.ports = portOrder.complement(n.ports)
		}
		s.m.dport = portOrder.intersect(s.m.dport, n.ports)
	case fieldSport:
		if !n.ports.all() || neg {
			s.blind("source port")
		}
	case fieldSaddr, fieldDaddr:
		o := addrOrderOf(s.v6)
		if neg {
			n.addrs = o.complement(n.addrs)
		}
		if n.f == fieldSaddr {
			s.m.saddr = o.intersect(s.m.saddr, n.addrs)
		} else {
			s.m.daddr = o.intersect(s.m.daddr, n.addrs)
		}
	case fieldIif:
		s.m.iif = s.m.iif.intersect(ifaceIn(neg, n.names...))
	case fieldOif:
		s.m.oif = s.m.oif.intersect(ifaceIn(neg, n.names...))
	case fieldBool:
		switch {
		case n.truth < 0:
			s.m.maybe = true
		case n.src != srcAny:
			s.source(!neg)
		case n.mark:
			if (n.truth == 1) == neg {
				s.m.marked = true
			}
		case (n.truth == 1) == neg:
			s.m.proto = 0
		}
	}
}

func (s *state) cmp(e ruleset.Cmp) {
	pieces := s.read(e.Sreg, len(e.Data))
	// "ct state new,…" is a mask compared with zero.
	if len(pieces) == 1 && pieces[0].v.kind == valCt && pieces[0].v.key == ruleset.CtKeyState && len(pieces[0].v.mask) == 4 {
		zero := len(bytes.Trim(e.Data, "\x00")) == 0
		if zero && e.Op <= ruleset.CmpNeq {
			s.ctState(binary.NativeEndian.Uint32(pieces[0].v.mask), e.Op == ruleset.CmpEq)
			return
		}
	}
	var parts []piece
	for _, p := range pieces {
		parts = append(parts, s.splitPiece(p)...)
	}
	if e.Op > ruleset.CmpGte || len(parts) > 1 && e.Op != ruleset.CmpEq || len(parts) == 0 {
		s.blind(describePieces(pieces))
		return
	}
	for _, p := range parts {
		if p.at+p.n > len(e.Data) {
			s.blind(p.v.describe())
			return
		}
		d := e.Data[p.at : p.at+p.n]
		lo, hi := bytes.Repeat([]byte{0}, p.n), bytes.Repeat([]byte{0xff}, p.n)
		switch e.Op {
		case ruleset.CmpEq, ruleset.CmpNeq:
			lo, hi = d, d
		case ruleset.CmpLte, ruleset.CmpGt:
			hi = d
		case ruleset.CmpGte, ruleset.CmpLt:
			lo = d
		}
		n := s.between(p, lo, hi)
		if n.f == fieldBool && e.Op > ruleset.CmpNeq && n.truth >= 0 {
			n = narrowing{why: p.v.describe()}
		}
		s.apply(n, e.Op == ruleset.CmpNeq || e.Op == ruleset.CmpGt || e.Op == ruleset.CmpLt)
	}
}

func describePieces(ps []piece) string {
	var names []string
	for _, p := range ps {
		names = append(names, p.v.describe())
	}
	if len(names) == 0 {
		return "a register"
	}
	return strings.Join(names, " . ")
}
