// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
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
	fieldFlags // of TCP
	fieldBool  // answered for each value by truth
)

// pieceField returns the field that p is a part of, the field's size, and how many
// bytes of it come before p. It is fieldNone for what is not understood.
func (s *state) pieceField(p piece) (f field, size, before int) {
	switch p.v.kind {
	case valPayload:
		return s.headerField(p.v.key, p.v.off+p.off, p.n)
	case valMeta:
		f, size = metaField(p.v.key, p.n)
	case valCt:
		f, size = s.ctField(p.v.key, p.n)
	case valFib:
		f, size = fieldBool, p.n
	default:
		f, size = fieldNone, p.n
	}
	if f == fieldNone {
		return f, size, 0
	}
	return f, size, p.off
}

// headerField is a field of a header, by offset and size.
type headerField struct {
	f        field
	at, size int
}

var (
	transportFields = []headerField{{fieldSport, 0, 2}, {fieldDport, 2, 2}, {fieldFlags, 13, 1}}
	ipv4Fields      = []headerField{{fieldProto, 9, 1}, {fieldSaddr, 12, 4}, {fieldDaddr, 16, 4}}
	ipv6Fields      = []headerField{{fieldProto, 6, 1}, {fieldSaddr, 8, 16}, {fieldDaddr, 24, 16}}
)

// headerField returns the field at an offset of the header that nftables calls base.
func (s *state) headerField(base uint32, off, n int) (f field, size, before int) {
	var fields []headerField
	switch {
	case base == ruleset.PayloadTransport:
		fields = transportFields
	case base == ruleset.PayloadNetwork && s.v6:
		fields = ipv6Fields
	case base == ruleset.PayloadNetwork:
		fields = ipv4Fields
	}
	for _, h := range fields {
		if off >= h.at && off < h.at+h.size {
			return h.f, h.size, off - h.at
		}
	}
	return fieldNone, n, 0
}

func metaField(key uint32, n int) (f field, size int) {
	switch key {
	case ruleset.MetaL4proto:
		return fieldProto, 1
	case ruleset.MetaIifname:
		return fieldIif, 16
	case ruleset.MetaOifname:
		return fieldOif, 16
	case ruleset.MetaIif, ruleset.MetaOif, ruleset.MetaNfproto, ruleset.MetaProtocol, ruleset.MetaMark:
		return fieldBool, n
	}
	return fieldNone, n
}

func (s *state) ctField(key uint32, n int) (f field, size int) {
	switch key {
	case ruleset.CtKeyProtocol:
		return fieldProto, 1
	case ruleset.CtKeyProtoDst:
		return fieldDport, 2
	case ruleset.CtKeySrc, ruleset.CtKeySrcIP, ruleset.CtKeySrcIP6:
		return fieldSaddr, s.addrLen()
	case ruleset.CtKeyDst, ruleset.CtKeyDstIP, ruleset.CtKeyDstIP6:
		return fieldDaddr, s.addrLen()
	case ruleset.CtKeyState:
		return fieldBool, n
	}
	return fieldNone, n
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
	f       field
	ports   region.Set[uint16]
	addrs   region.Set[netip.Addr]
	proto   uint8
	names   []string
	truth   int8   // of fieldBool: 1 yes, 0 no, -1 not known
	src     bool   // of fieldBool: the type of the source, in ends
	dst     bool   // of fieldBool: the type of the destination, in ends
	ends    uint8  // region.Local, region.Remote
	mark    bool   // of fieldBool: whether a packet mark of 0 passes
	related bool   // of fieldBool: about a relation to another connection
	why     string // not understood
}

// between returns what lo ≤ p ≤ hi means.
func (s *state) between(p piece, lo, hi []byte) narrowing {
	if p.v.kind == valAny {
		return narrowing{f: fieldBool, truth: -1}
	}
	bad := narrowing{why: p.v.describe()}
	f, size, before := s.pieceField(p)
	if f == fieldNone || len(lo) < p.n || len(hi) < p.n {
		return bad
	}
	lo, hi = lo[:p.n], hi[:p.n]
	eq := bytes.Equal(lo, hi)
	if f == fieldBool {
		if !eq || p.off != 0 || p.v.mask != nil && p.v.key != ruleset.MetaMark {
			return bad
		}
		if n, ok := s.truth(p.v, lo); ok {
			return n
		}
		return bad
	}
	if before != 0 || p.n < size && !eq {
		return bad
	}
	if f == fieldFlags {
		if n, ok := s.flags(p, lo[0]); ok && eq {
			return n
		}
		return bad
	}
	if f == fieldIif || f == fieldOif {
		if !eq || p.v.mask != nil {
			return bad
		}
		name := ruleset.CString(lo)
		if len(name) == p.n && p.n < size {
			name += "*"
		}
		return narrowing{f: f, names: []string{name}}
	}
	l, h, ok := p.widen(lo, hi, size, eq)
	if !ok {
		return bad
	}
	return s.inRange(f, l, h)
}

// flags answers a comparison of the flags of TCP, masked, with want.
func (s *state) flags(p piece, want byte) (n narrowing, ok bool) {
	mask, xor := byte(0xff), byte(0)
	if len(p.v.mask) > p.off {
		mask = p.v.mask[p.off]
	}
	if len(p.v.xor) > p.off {
		xor = p.v.xor[p.off]
	}
	known := mask&flagsUnsure == 0 && s.m.Protocols&region.UDP == 0
	return isTrue(flagSYN&mask^xor == want), known
}

// widen extends lo ≤ p ≤ hi to the whole field, of which p is the beginning: bytes
// and bits that the comparison does not see may have any value.
func (p piece) widen(lo, hi []byte, size int, eq bool) (l, h []byte, ok bool) {
	l, h = make([]byte, size), bytes.Repeat([]byte{0xff}, size)
	copy(l, lo)
	copy(h, hi)
	if p.v.mask == nil {
		return l, h, true
	}
	if !eq || len(p.v.mask) < p.off+p.n || len(bytes.Trim(p.v.xor, "\x00")) != 0 {
		return nil, nil, false
	}
	ended := false // the mask must be a prefix
	for i := range p.n {
		m := p.v.mask[p.off+i]
		inv := ^m
		if ended && m != 0 || inv&(inv+1) != 0 || lo[i]&inv != 0 {
			return nil, nil, false
		}
		ended = ended || m != 0xff
		h[i] |= inv
	}
	return l, h, true
}

// inRange is the condition that a field is between l and h.
func (s *state) inRange(f field, l, h []byte) narrowing {
	n := narrowing{f: f}
	switch f {
	case fieldProto:
		for _, p := range []byte{byte(port.TCP), byte(port.UDP)} {
			if p >= l[0] && p <= h[0] {
				n.proto |= protocolBit(p)
			}
		}
	case fieldSport, fieldDport:
		n.ports = region.Ports().Range(binary.BigEndian.Uint16(l), binary.BigEndian.Uint16(h))
	default: // an address
		a, _ := netip.AddrFromSlice(l)
		b, _ := netip.AddrFromSlice(h)
		n.addrs = region.Addrs(s.v6).Range(a, b)
	}
	return n
}

// truth answers v == b for the packets that are of interest; not ok if that is not
// understood.
func (s *state) truth(v *value, b []byte) (n narrowing, ok bool) {
	switch {
	case v.kind == valMeta && v.key == ruleset.MetaNfproto:
		family := byte(ruleset.FamilyIP)
		if s.v6 {
			family = ruleset.FamilyIP6
		}
		return isTrue(b[0] == family), true
	case v.kind == valMeta && v.key == ruleset.MetaProtocol:
		if len(b) < 2 {
			return n, false
		}
		etherType := uint16(etherIPv4)
		if s.v6 {
			etherType = etherIPv6
		}
		return isTrue(binary.BigEndian.Uint16(b) == etherType), true
	}
	if len(b) < 4 {
		return n, false
	}
	number := binary.NativeEndian.Uint32(b)
	switch v.kind {
	case valMeta:
		return s.metaTruth(v, number, b[:4])
	case valCt:
		n = isTrue(number&ctNew != 0)
		n.related = number&(ctNew|ctRelated) == ctRelated
		return n, true
	case valFib:
		n = narrowing{f: fieldBool, src: v.key == ruleset.FibSaddr, dst: v.key == ruleset.FibDaddr, ends: endsOf(number)}
		return n, n.src || n.dst
	}
	return n, false
}

// endsOf returns which ends of a connection that can be have an address of a type.
// One that is not an own address has a route, so it is a unicast one.
func endsOf(rtn uint32) uint8 {
	switch rtn {
	case ruleset.RtnLocal:
		return region.Local
	case ruleset.RtnUnicast:
		return region.Remote
	}
	return 0
}

// Ethernet types (linux/if_ether.h).
const (
	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd
)

// metaTruth answers for an interface's index and for the packet mark.
func (s *state) metaTruth(v *value, number uint32, b []byte) (n narrowing, ok bool) {
	switch v.key {
	case ruleset.MetaIif:
		return narrowing{f: fieldIif, names: []string{s.env.ifname(number)}}, true
	case ruleset.MetaOif:
		return narrowing{f: fieldOif, names: []string{s.env.ifname(number)}}, true
	case ruleset.MetaMark:
		if v.xor != nil && len(v.xor) < 4 {
			return n, false
		}
		zero := make([]byte, 4) // the mark of a packet that nothing marked
		copy(zero, v.xor)
		n = isTrue(bytes.Equal(zero, b))
		n.mark = true
		return n, true
	}
	return n, false
}

func isTrue(t bool) narrowing {
	if t {
		return narrowing{f: fieldBool, truth: 1}
	}
	return narrowing{f: fieldBool}
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
	if a.f != b.f || a.src != b.src || a.dst != b.dst {
		return narrowing{why: "a set of several kinds"}
	}
	a.ports = region.Ports().Union(a.ports, b.ports)
	a.addrs = region.Addrs(s.v6).Union(a.addrs, b.addrs)
	a.proto |= b.proto
	a.names = append(slices.Clip(a.names), b.names...)
	a.truth = max(a.truth, b.truth)
	a.ends |= b.ends
	a.mark, a.related = a.mark || b.mark, a.related || b.related
	return a
}

// apply narrows s by n, or by its contrary.
func (s *state) apply(n narrowing, neg bool) {
	if n.why != "" {
		s.blind(n.why)
		return
	}
	addrs := func(to *region.Set[netip.Addr]) {
		if neg {
			n.addrs = n.addrs.Complement()
		}
		*to = region.Addrs(s.v6).Intersect(*to, n.addrs)
	}
	switch n.f {
	case fieldProto:
		if neg {
			n.proto = ^n.proto
		}
		s.m.Protocols &= n.proto
	case fieldDport:
		if neg {
			n.ports = n.ports.Complement()
		}
		s.m.Dport = region.Ports().Intersect(s.m.Dport, n.ports)
	case fieldSport:
		if !n.ports.All() || neg {
			s.blind("source port")
		}
	case fieldSaddr:
		addrs(&s.m.Saddr)
	case fieldDaddr:
		addrs(&s.m.Daddr)
	case fieldIif:
		s.m.In = region.Names().Intersect(s.m.In, interfaces(neg, n.names...))
	case fieldOif:
		s.m.Out = region.Names().Intersect(s.m.Out, interfaces(neg, n.names...))
	case fieldBool:
		s.applyTruth(n, neg)
	}
}

// applyTruth narrows s by a condition that is true, false or not known.
func (s *state) applyTruth(n narrowing, neg bool) {
	fails := (n.truth == 1) == neg
	switch {
	case n.truth < 0:
		s.m.maybe = true
	case n.src:
		s.m.From &= invertEnds(n.ends, neg)
	case n.dst:
		s.m.To &= invertEnds(n.ends, neg)
	case n.mark:
		s.mark(!fails)
	case n.related:
		s.m.marked = s.m.marked || fails
	case fails:
		s.m.none()
	}
}

// cmp narrows s by a comparison with a constant.
func (s *state) cmp(e ruleset.Cmp) {
	pieces := s.read(e.Sreg, len(e.Data))
	if mask, ok := stateMask(pieces); ok && len(bytes.Trim(e.Data, "\x00")) == 0 && e.Op <= ruleset.CmpNeq {
		s.ctState(mask, e.Op == ruleset.CmpEq)
		return
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
		lo, hi, neg := bounds(e.Op, e.Data[p.at:p.at+p.n])
		n := s.between(p, lo, hi)
		if n.f == fieldBool && e.Op > ruleset.CmpNeq && n.truth >= 0 {
			n = narrowing{why: p.v.describe()}
		}
		s.apply(n, neg)
	}
}

// stateMask returns the mask under which the connection's state was loaded:
// "ct state new,…" is a mask compared with zero.
func stateMask(pieces []piece) (uint32, bool) {
	if len(pieces) != 1 {
		return 0, false
	}
	v := pieces[0].v
	if v.kind != valCt || v.key != ruleset.CtKeyState || len(v.mask) != 4 {
		return 0, false
	}
	return binary.NativeEndian.Uint32(v.mask), true
}

// bounds returns between which values a comparison with b holds, or does not hold
// if neg.
func bounds(op uint32, b []byte) (lo, hi []byte, neg bool) {
	lo, hi = make([]byte, len(b)), bytes.Repeat([]byte{0xff}, len(b))
	switch op {
	case ruleset.CmpEq, ruleset.CmpNeq:
		lo, hi = b, b
	case ruleset.CmpLte, ruleset.CmpGt:
		hi = b
	case ruleset.CmpGte, ruleset.CmpLt:
		lo = b
	}
	return lo, hi, op == ruleset.CmpNeq || op == ruleset.CmpGt || op == ruleset.CmpLt
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

// inSpan narrows s by a comparison with a range.
func (s *state) inSpan(e ruleset.Range) {
	parts := s.read(e.Sreg, len(e.From))
	if len(parts) != 1 || len(e.From) != len(e.To) {
		s.blind(describePieces(parts))
		return
	}
	n := s.between(parts[0], e.From, e.To)
	if n.f == fieldBool && n.truth >= 0 && !bytes.Equal(e.From, e.To) {
		n = narrowing{why: parts[0].v.describe()}
	}
	s.apply(n, e.Op == ruleset.CmpNeq)
}
