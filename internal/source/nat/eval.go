// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// evaluation is what one rule does, seen alone: the branches in which it ends,
// each with the packets that take it.
type evaluation struct {
	branches map[string]*branch // by the set elements that led there
	sets     []*namedSet        // that were read
	split    *namedSet          // the one set whose elements are the branches' keys, if so
	inert    bool               // no branch jumps or decides
	tooMany  bool
}

type branch struct {
	m   match
	end branchEnd
}

type endKind uint8

const (
	endNone endKind = iota // goes on to the next rule
	endAccept
	endDrop
	endReturn
	endJump
	endGoto
	endNat
	endUnknown // nobody knows
)

type branchEnd struct {
	kind  endKind
	chain string
	nat   *natAction
	why   string // nat not understood, or endUnknown
}

const maxBranches = 1 << 17

// env is what a rule's evaluation needs to know of the machine.
type env struct {
	links map[uint32]string
}

func (e *env) ifname(index uint32) string {
	if index == 0 {
		return ""
	}
	if n, ok := e.links[index]; ok {
		return n
	}
	return fmt.Sprintf("if%d", index)
}

type valueKind uint8

const (
	valUnknown valueKind = iota
	valConst
	valPayload
	valMeta
	valCt
	valFib
	valAny // any number below a modulus
)

// value is what a register load put there: a constant or a field of the packet.
type value struct {
	kind      valueKind
	key       uint32 // of meta and ct; base of payload; fib flags
	off, n    int    // payload offset; length in bytes
	data      []byte // of a constant
	mask, xor []byte
	name      string
}

type register struct {
	v    *value
	part int // which four bytes of v
}

// state is one way through a rule so far.
type state struct {
	v6   bool
	m    match
	regs [16]register
	key  string
	env  *env
}

// blind notes a condition that is not understood.
func (s *state) blind(what string) {
	s.m.opaque = append(slices.Clip(s.m.opaque), what)
}

func (s *state) store(r uint32, v *value) {
	i, ok := regIndex(r)
	if !ok {
		return
	}
	for part := 0; part < max((v.n+3)/4, 1) && i+part < len(s.regs); part++ {
		s.regs[i+part] = register{v, part}
	}
}

// piece is a run of register bytes that come from one value.
type piece struct {
	v      *value
	off, n int // bytes of v
	at     int // offset in the data that it is compared to
}

// read returns the pieces of n bytes from register r.
func (s *state) read(r uint32, n int) []piece {
	i, ok := regIndex(r)
	if !ok {
		return nil
	}
	var out []piece
	for k := 0; k < n; {
		at := i + k/4
		if at >= len(s.regs) || s.regs[at].v == nil {
			return append(out, piece{v: &value{name: "an unset register"}, n: n - k, at: k})
		}
		reg := s.regs[at]
		run := 1
		for at+run < len(s.regs) && s.regs[at+run] == (register{reg.v, reg.part + run}) {
			run++
		}
		l := min(reg.v.n-reg.part*4, run*4, n-k)
		if l <= 0 {
			return append(out, piece{v: &value{name: "a register"}, n: n - k, at: k})
		}
		out = append(out, piece{v: reg.v, off: reg.part * 4, n: l, at: k})
		k += (l + 3) &^ 3
	}
	return out
}

func (s *state) constant(r uint32, n int) ([]byte, bool) {
	p := s.read(r, n)
	if len(p) == 1 && p[0].v.kind == valConst && p[0].off+n <= len(p[0].v.data) {
		return p[0].v.data[p[0].off : p[0].off+n], true
	}
	return nil, false
}

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
		case metaL4proto:
			return fieldProto, 1, p.off
		case metaIifname:
			return fieldIif, 16, p.off
		case metaOifname:
			return fieldOif, 16, p.off
		case metaIif, metaOif, metaNfproto, metaProtocol, metaMark:
			return fieldBool, p.n, p.off
		}
	case valCt:
		switch v.key {
		case ctKeyProtocol:
			return fieldProto, 1, p.off
		case ctKeyProtoDst:
			return fieldDport, 2, p.off
		case ctKeyDst, ctKeyDstIP, ctKeyDstIP6:
			n := 4
			if s.v6 {
				n = 16
			}
			return fieldDaddr, n, p.off
		case ctKeyState:
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
		name := cstr(lo)
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
	if v.mask != nil && v.key != metaMark {
		return bad
	}
	switch v.kind {
	case valMeta:
		switch v.key {
		case metaNfproto:
			return set(b[0] == 2 && !s.v6 || b[0] == 10 && s.v6)
		case metaProtocol:
			if len(b) < 2 {
				return bad
			}
			e := binary.BigEndian.Uint16(b)
			return set(e == 0x0800 && !s.v6 || e == 0x86dd && s.v6)
		case metaIif, metaOif:
			i, ok := host()
			if !ok {
				return bad
			}
			n.f = fieldIif
			if v.key == metaOif {
				n.f = fieldOif
			}
			n.names = []string{s.env.ifname(i)}
			return n
		case metaMark:
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
		case fibDaddr:
			return set(t == rtnLocal)
		case fibSaddr:
			if t != rtnLocal {
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

func (s *state) cmp(e exprCmp) {
	pieces := s.read(e.sreg, len(e.data))
	// "ct state new,…" is a mask compared with zero.
	if len(pieces) == 1 && pieces[0].v.kind == valCt && pieces[0].v.key == ctKeyState && len(pieces[0].v.mask) == 4 {
		zero := len(bytes.Trim(e.data, "\x00")) == 0
		if zero && e.op <= cmpNeq {
			s.ctState(binary.NativeEndian.Uint32(pieces[0].v.mask), e.op == cmpEq)
			return
		}
	}
	var parts []piece
	for _, p := range pieces {
		parts = append(parts, s.splitPiece(p)...)
	}
	if e.op > cmpGte || len(parts) > 1 && e.op != cmpEq || len(parts) == 0 {
		s.blind(describePieces(pieces))
		return
	}
	for _, p := range parts {
		if p.at+p.n > len(e.data) {
			s.blind(p.v.describe())
			return
		}
		d := e.data[p.at : p.at+p.n]
		lo, hi := bytes.Repeat([]byte{0}, p.n), bytes.Repeat([]byte{0xff}, p.n)
		switch e.op {
		case cmpEq, cmpNeq:
			lo, hi = d, d
		case cmpLte, cmpGt:
			hi = d
		case cmpGte, cmpLt:
			lo = d
		}
		n := s.between(p, lo, hi)
		if n.f == fieldBool && e.op > cmpNeq && n.truth >= 0 {
			n = narrowing{why: p.v.describe()}
		}
		s.apply(n, e.op == cmpNeq || e.op == cmpGt || e.op == cmpLt)
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

// ielem is an element with its whole interval.
type ielem struct {
	id       string
	lo, hi   []byte
	data     []byte
	verdict  *verdict
	catchall bool
}

// items returns the elements of n as intervals. Without only, all of them.
func (n *namedSet) items(only map[string]struct{}) []ielem {
	var out []ielem
	add := func(id string, e element, lo, hi []byte) {
		out = append(out, ielem{id: id, lo: lo, hi: hi, data: e.data, verdict: e.verdict, catchall: e.flags&elemCatchall != 0})
	}
	if only != nil {
		for id := range only {
			if e, ok := n.elems[id]; ok {
				add(id, e, e.key, e.keyEnd())
			}
		}
		return out
	}
	if n.flags&setInterval == 0 || n.concat() {
		for id, e := range n.elems {
			add(id, e, e.key, e.keyEnd())
		}
		return out
	}
	list := make([]string, 0, len(n.elems))
	for id, e := range n.elems {
		if e.flags&elemCatchall != 0 {
			add(id, e, nil, nil)
			continue
		}
		list = append(list, id)
	}
	slices.SortFunc(list, func(a, b string) int {
		x, y := n.elems[a], n.elems[b]
		if c := bytes.Compare(x.key, y.key); c != 0 {
			return c
		}
		return int(y.flags&elemIntervalEnd) - int(x.flags&elemIntervalEnd) // an end comes first
	})
	for i, id := range list {
		e := n.elems[id]
		if e.flags&elemIntervalEnd != 0 {
			continue
		}
		hi := bytes.Repeat([]byte{0xff}, len(e.key))
		if e.end != nil {
			hi = e.end
		} else if i+1 < len(list) {
			hi = before(n.elems[list[i+1]].key)
		}
		add(id, e, e.key, hi)
	}
	return out
}

func (e element) keyEnd() []byte {
	if e.end != nil {
		return e.end
	}
	return e.key
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

// lookup narrows s to the set's elements; a map leaves one state for each.
func (s *state) lookup(e exprLookup, n *namedSet, only map[string]struct{}, emit func(*state, *verdict)) {
	if n == nil {
		s.blind("@" + e.set + ", which is not known")
		emit(s, nil)
		return
	}
	if n.blank {
		s.blind("@" + e.set + ", which is not read yet")
		emit(s, nil)
		return
	}
	var parts []piece
	for _, p := range s.read(e.sreg, n.keyLen) {
		parts = append(parts, s.splitPiece(p)...)
	}
	if n.changing() {
		// Packets fill it, as with the clients that a balancer remembers.
		f := fieldNone
		if len(parts) == 1 {
			f, _, _ = s.pieceField(parts[0])
		}
		if f == fieldSaddr && !e.hasDreg {
			s.m.maybe = true
			if !e.invert {
				s.m.clients = "@" + e.set
			}
		} else {
			s.blind("@" + e.set + ", whose elements come and go")
		}
		emit(s, nil)
		return
	}
	items := n.items(only)
	if !e.hasDreg && (len(parts) == 1 || e.invert) {
		if len(parts) != 1 {
			s.blind("!= @" + e.set)
			emit(s, nil)
			return
		}
		if len(items) == 0 {
			if !e.invert {
				s.m.proto = 0
			}
			emit(s, nil)
			return
		}
		s.apply(s.uniteItems(parts[0], items), e.invert)
		emit(s, nil)
		return
	}
	for _, it := range items {
		t := *s
		t.key += it.id + ";"
		switch {
		case it.catchall && len(parts) == 1:
			var rest []ielem
			for _, o := range n.items(nil) {
				if !o.catchall {
					rest = append(rest, o)
				}
			}
			if len(rest) > 0 {
				t.apply(t.uniteItems(parts[0], rest), true)
			}
		case it.catchall:
			t.blind("the rest of @" + e.set)
		default:
			for _, p := range parts {
				if p.at+p.n > len(it.lo) || p.at+p.n > len(it.hi) {
					t.blind(p.v.describe())
					continue
				}
				t.apply(t.between(p, it.lo[p.at:], it.hi[p.at:]), false)
			}
		}
		if e.hasDreg && e.dreg != 0 {
			t.store(e.dreg, &value{kind: valConst, data: it.data, n: len(it.data)})
		}
		emit(&t, it.verdict)
	}
}

// uniteItems is what membership of p in items means.
func (s *state) uniteItems(p piece, items []ielem) narrowing {
	acc := narrowing{}
	var ports []span[uint16]
	var addrs []span[netip.Addr]
	for i, it := range items {
		n := s.between(p, it.lo, it.hi)
		if n.why != "" {
			return n
		}
		switch {
		case n.f == fieldDport || n.f == fieldSport:
			acc.f = n.f
			if n.ports == nil {
				return n
			}
			ports = append(ports, n.ports...)
		case n.f == fieldDaddr || n.f == fieldSaddr:
			acc.f = n.f
			if n.addrs == nil {
				return n
			}
			addrs = append(addrs, n.addrs...)
		case i == 0:
			acc = n
		default:
			acc = s.unite(acc, n)
		}
	}
	if ports != nil {
		acc.ports = portOrder.normal(ports)
	}
	if addrs != nil {
		acc.addrs = addrOrderOf(s.v6).normal(addrs)
	}
	return acc
}

// nat reads a native nat expression.
func (s *state) nat(e exprNat) (branchEnd, bool) {
	if e.kind != 1 {
		return branchEnd{}, false // source NAT; the destination stays
	}
	n := &natAction{}
	bad := func(why string) (branchEnd, bool) { return branchEnd{kind: endNat, why: why}, true }
	if e.flags&natNetmap != 0 {
		return bad("a prefix mapping")
	}
	if e.addrMin != 0 {
		size := 4
		if e.family == famIP6 {
			size = 16
		}
		if (e.family == famIP6) != s.v6 {
			return branchEnd{}, false // never reached by this family
		}
		lo, ok := s.constant(e.addrMin, size)
		if !ok {
			return bad("an address that is not constant")
		}
		hi := lo
		if e.addrMax != 0 && e.addrMax != e.addrMin {
			if hi, ok = s.constant(e.addrMax, size); !ok {
				return bad("an address that is not constant")
			}
		}
		a, _ := netip.AddrFromSlice(lo)
		b, _ := netip.AddrFromSlice(hi)
		n.setAddrs(addrRange{a, b})
	}
	if why := s.natPorts(n, e.protoMin, e.protoMax); why != "" {
		return bad(why)
	}
	return branchEnd{kind: endNat, nat: n}, true
}

func (s *state) natPorts(n *natAction, minReg, maxReg uint32) string {
	if minReg == 0 {
		return ""
	}
	lo, ok := s.constant(minReg, 2)
	if !ok {
		p := s.read(minReg, 2)
		if len(p) == 1 {
			if f, _, before := s.pieceField(p[0]); f == fieldDport && before == 0 && p[0].v.mask == nil {
				return ""
			}
		}
		return "a port that is not constant"
	}
	hi := lo
	if maxReg != 0 && maxReg != minReg {
		if hi, ok = s.constant(maxReg, 2); !ok {
			return "a port that is not constant"
		}
	}
	n.setPorts(binary.BigEndian.Uint16(lo), binary.BigEndian.Uint16(hi))
	return ""
}

// evaluate works out rule r for one family. With only, just the branches of
// those elements of the set that splits it.
func evaluate(r *rule, v6 bool, ev *env, only map[string]struct{}) *evaluation {
	out := &evaluation{branches: make(map[string]*branch), inert: true}
	t := r.chain.table
	var exprs []any
	var err error
	if t.id.legacy {
		exprs, err = parseLegacyRule(v6, r.raw)
	} else {
		exprs, err = parseExprs(r.raw)
	}
	end := func(s *state, e branchEnd) {
		if s.m.dead() || e.kind == endNone {
			return
		}
		out.inert = false
		if len(out.branches) >= maxBranches {
			out.tooMany = true
			return
		}
		out.branches[s.key] = &branch{m: s.m, end: e}
	}
	first := &state{v6: v6, m: everything(), env: ev}
	if err != nil {
		first.blind(err.Error())
		end(first, branchEnd{kind: endUnknown, why: err.Error()})
		return out
	}
	splits := 0
	reads := make(map[*namedSet]int)
	states := []*state{first}
	for _, x := range exprs {
		if l, ok := x.(exprLookup); ok {
			n := t.sets[l.set]
			if n != nil {
				reads[n]++
			}
			branching := n != nil && (l.hasDreg || len(states) > 0 && s0Parts(states[0], l, n) > 1 && !l.invert)
			if branching {
				splits++
				out.split = n
			}
			var next []*state
			for _, s := range states {
				s.lookup(l, n, pick(branching, only), func(s *state, v *verdict) {
					if s.m.dead() || len(next) >= maxBranches {
						out.tooMany = out.tooMany || len(next) >= maxBranches
						return
					}
					if v != nil {
						if e, stop := verdictEnd(*v); stop {
							end(s, e)
							return
						}
					}
					next = append(next, s)
				})
			}
			states = next
			continue
		}
		next := states[:0]
		for _, s := range states {
			e, stop := s.step(x)
			if stop {
				end(s, e)
				continue
			}
			if !s.m.dead() {
				next = append(next, s)
			}
		}
		states = next
	}
	for n, times := range reads {
		out.sets = append(out.sets, n)
		if n == out.split && times > 1 {
			out.split = nil
		}
	}
	if splits != 1 || out.split != nil && (out.split.flags&setInterval != 0 && !out.split.concat() || out.split.hasCatchall()) {
		out.split = nil
	}
	return out
}

func pick(yes bool, only map[string]struct{}) map[string]struct{} {
	if yes {
		return only
	}
	return nil
}

func s0Parts(s *state, l exprLookup, n *namedSet) int {
	parts := 0
	for _, p := range s.read(l.sreg, n.keyLen) {
		parts += len(s.splitPiece(p))
	}
	return parts
}

func verdictEnd(v verdict) (branchEnd, bool) {
	switch v.code {
	case vAccept:
		return branchEnd{kind: endAccept}, true
	case vDrop:
		return branchEnd{kind: endDrop}, true
	case vReturn:
		return branchEnd{kind: endReturn}, true
	case vJump:
		return branchEnd{kind: endJump, chain: v.chain}, true
	case vGoto:
		return branchEnd{kind: endGoto, chain: v.chain}, true
	case vContinue, vBreak:
		return branchEnd{}, v.code == vBreak
	}
	return branchEnd{kind: endUnknown, why: fmt.Sprintf("verdict %d", v.code)}, true
}

// step runs one expression; stop says that the rule ends here.
func (s *state) step(x any) (end branchEnd, stop bool) {
	switch e := x.(type) {
	case exprImmediate:
		if e.verdict != nil {
			return verdictEnd(*e.verdict)
		}
		s.store(e.dreg, &value{kind: valConst, data: e.data, n: len(e.data)})
	case exprVerdict:
		return verdictEnd(e.verdict)
	case exprCmp:
		s.cmp(e)
	case exprRange:
		parts := s.read(e.sreg, len(e.from))
		if len(parts) != 1 || len(e.from) != len(e.to) {
			s.blind(describePieces(parts))
			break
		}
		n := s.between(parts[0], e.from, e.to)
		if n.f == fieldBool && n.truth >= 0 && !bytes.Equal(e.from, e.to) {
			n = narrowing{why: parts[0].v.describe()}
		}
		s.apply(n, e.op == cmpNeq)
	case exprPayload:
		if e.sreg == 0 && e.length <= 64 && e.offset < 1<<16 {
			s.store(e.dreg, &value{kind: valPayload, key: e.base, off: int(e.offset), n: int(e.length),
				name: fmt.Sprintf("payload @%d,%d,%d", e.base, e.offset*8, e.length*8)})
		} else if e.sreg != 0 {
			return branchEnd{kind: endUnknown, why: "a payload that is written"}, true
		}
	case exprMeta:
		if e.sreg != 0 {
			break // marks the packet
		}
		n := 4
		switch e.key {
		case metaIifname, metaOifname:
			n = 16
		case metaNfproto, metaL4proto:
			n = 1
		case metaProtocol:
			n = 2
		}
		name, ok := metaNames[e.key]
		if !ok {
			name = fmt.Sprintf("meta %d", e.key)
		}
		s.store(e.dreg, &value{kind: valMeta, key: e.key, n: n, name: name})
	case exprCt:
		if e.sreg != 0 {
			break
		}
		v := &value{kind: valCt, key: e.key, n: 4, name: fmt.Sprintf("ct key %d", e.key)}
		switch {
		case e.key == ctKeyState:
			v.name = "ct state"
		case e.dir != 0:
			v.kind, v.n = valUnknown, 16
		case e.key == ctKeyProtocol:
			v.n = 1
		case e.key == ctKeyProtoDst:
			v.n = 2
		case e.key == ctKeyDstIP6 || e.key == ctKeyDst && s.v6:
			v.n = 16
		case e.key != ctKeyDst && e.key != ctKeyDstIP:
			v.kind = valUnknown
		}
		s.store(e.dreg, v)
	case exprFib:
		v := &value{kind: valFib, key: e.flags, n: 4, name: "fib"}
		if e.result != fibAddrtype {
			v.kind, v.n = valUnknown, 16
		}
		s.store(e.dreg, v)
	case exprBitwise:
		s.bitwise(e)
	case exprByteorder:
		if p := s.read(e.sreg, int(min(e.length, 64))); len(p) == 1 && p[0].v.kind == valConst {
			break
		}
		if e.sreg != e.dreg || e.length > 1 {
			s.store(e.dreg, &value{n: int(min(e.length, 64)), name: "a number in another byte order"})
		}
	case exprNumgen:
		s.store(e.dreg, &value{kind: valAny, n: 4, name: e.what})
	case exprNat:
		return s.nat(e)
	case exprRedir:
		n := &natAction{redirect: true}
		if why := s.natPorts(n, e.protoMin, e.protoMax); why != "" {
			return branchEnd{kind: endNat, why: why}, true
		}
		return branchEnd{kind: endNat, nat: n}, true
	case exprPass:
	case exprHeader:
		s.header(e)
	case exprMatch:
		s.match(e)
	case exprTarget:
		return s.target(e)
	case exprOther:
		switch e.name {
		case "masq", "objref", "dynset":
		case "queue", "tproxy", "reject", "fwd", "synproxy":
			return branchEnd{kind: endUnknown, why: e.name}, true
		default:
			s.blind(e.name)
		}
	}
	return branchEnd{}, false
}

func (s *state) bitwise(e exprBitwise) {
	n := int(min(e.length, 64))
	p := s.read(e.sreg, n)
	if e.op == 0 && len(p) == 1 && p[0].off == 0 && p[0].n == p[0].v.n && p[0].v.mask == nil &&
		p[0].v.kind != valUnknown && p[0].v.kind != valConst && len(e.mask) >= p[0].n {
		v := *p[0].v
		v.mask, v.xor = e.mask, e.xor
		s.store(e.dreg, &v)
		return
	}
	name := "bit arithmetic"
	if len(p) > 0 {
		name = "bit arithmetic on " + p[0].v.describe()
	}
	s.store(e.dreg, &value{n: n, name: name})
}
