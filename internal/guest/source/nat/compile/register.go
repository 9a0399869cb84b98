// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

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

func (s *state) store(r uint32, v *value) {
	i, ok := ruleset.RegIndex(r)
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
	i, ok := ruleset.RegIndex(r)
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

// changesField reports whether a write to the packet may change a field that is
// understood. nft writes two bytes to change one, and keeps the other.
func (s *state) changesField(e ruleset.Payload) bool {
	off, n := int(e.Offset), int(e.Length)
	if n > 64 || off >= 1<<16 {
		return true
	}
	p := s.read(e.Sreg, n)
	same := len(p) == 1 && p[0].n == n && p[0].v.kind == valPayload && p[0].v.key == e.Base && p[0].v.off+p[0].off == off
	for i := range n {
		f, _, _ := s.headerField(e.Base, off+i, 1)
		if (f != fieldNone || s.beyond(e.Base, off+i)) && !(same && p[0].v.keeps(p[0].off+i)) {
			return true
		}
	}
	return false
}

// beyond reports whether an offset is behind the header that nftables calls base, in that of
// the next layer.
func (s *state) beyond(base uint32, off int) bool {
	switch {
	case base == ruleset.PayloadLink:
		return off >= 14
	case base == ruleset.PayloadNetwork && s.v6:
		return off >= 40
	}
	return base == ruleset.PayloadNetwork && off >= 20
}

// keeps reports whether a byte of v is as it was loaded.
func (v *value) keeps(i int) bool {
	return v.mask == nil || i < len(v.mask) && v.mask[i] == 0xff && (i >= len(v.xor) || v.xor[i] == 0)
}

// load runs an expression that loads a register.
func (s *state) load(x any) {
	switch e := x.(type) {
	case ruleset.Payload:
		if e.Length <= 64 && e.Offset < 1<<16 {
			s.store(e.Dreg, &value{kind: valPayload, key: e.Base, off: int(e.Offset), n: int(e.Length),
				name: fmt.Sprintf("payload @%d,%d,%d", e.Base, e.Offset*8, e.Length*8)})
		}
	case ruleset.Meta:
		if e.Sreg == 0 {
			s.store(e.Dreg, metaValue(e.Key))
		}
	case ruleset.Ct:
		switch {
		case e.Sreg != 0:
		case s.breaks(e.Key):
			s.m.none()
		default:
			s.store(e.Dreg, s.ctValue(e))
		}
	case ruleset.Fib:
		v := &value{kind: valFib, key: e.Flags, n: 4, name: "fib"}
		if e.Result != ruleset.FibAddrtype {
			v.kind, v.n = valUnknown, 16
		}
		s.store(e.Dreg, v)
	case ruleset.Numgen:
		s.store(e.Dreg, &value{kind: valAny, n: 4, name: e.What})
	case ruleset.Bitwise:
		s.bitwise(e)
	case ruleset.Byteorder:
		s.byteorder(e)
	}
}

func metaValue(key uint32) *value {
	n := 4
	switch key {
	case ruleset.MetaIifname, ruleset.MetaOifname:
		n = 16
	case ruleset.MetaNfproto, ruleset.MetaL4proto:
		n = 1
	case ruleset.MetaProtocol:
		n = 2
	}
	name, ok := ruleset.MetaNames[key]
	if !ok {
		name = fmt.Sprintf("meta %d", key)
	}
	return &value{kind: valMeta, key: key, n: n, name: name}
}

// breaks reports whether the kernel ends a rule at a load of a key of conntrack, which is an
// address of the other family (nft_ct_get_eval).
func (s *state) breaks(key uint32) bool {
	if s.v6 {
		return key == ruleset.CtKeySrcIP || key == ruleset.CtKeyDstIP
	}
	return key == ruleset.CtKeySrcIP6 || key == ruleset.CtKeyDstIP6
}

func (s *state) ctValue(e ruleset.Ct) *value {
	v := &value{kind: valCt, key: e.Key, n: 4, name: e.Name()}
	switch {
	case e.Key == ruleset.CtKeyState:
	case e.Dir != 0: // not as the connection's first packet has it
		v.kind, v.n = valUnknown, 16
	case e.Key == ruleset.CtKeyProtocol:
		v.n = 1
	case e.Key == ruleset.CtKeyProtoDst:
		v.n = 2
	default:
		if f, _ := s.ctField(e.Key, v.n); f != fieldSaddr && f != fieldDaddr {
			v.kind = valUnknown
		}
		v.n = s.addrLen()
	}
	return v
}

// addrLen returns how many bytes an address has.
func (s *state) addrLen() int {
	if s.v6 {
		return 16
	}
	return 4
}

func (s *state) byteorder(e ruleset.Byteorder) {
	n := int(min(e.Length, 64))
	p := s.read(e.Sreg, n)
	switch {
	case len(p) == 1 && p[0].v.kind == valConst:
		return
	case len(p) == 1 && p[0].v.kind == valAny:
		s.store(e.Dreg, p[0].v) // any number in any order
		return
	}
	if e.Sreg != e.Dreg || e.Length > 1 {
		s.store(e.Dreg, &value{n: n, name: "a number in another byte order"})
	}
}

func (s *state) bitwise(e ruleset.Bitwise) {
	n := int(min(e.Length, 64))
	p := s.read(e.Sreg, n)
	if len(p) == 1 && p[0].v.kind == valAny {
		s.store(e.Dreg, p[0].v)
		return
	}
	if e.Op == 0 && len(p) == 1 && p[0].off == 0 && p[0].n == p[0].v.n && p[0].v.mask == nil &&
		p[0].v.kind != valUnknown && p[0].v.kind != valConst && len(e.Mask) >= p[0].n {
		v := *p[0].v
		v.mask, v.xor = e.Mask, e.Xor
		s.store(e.Dreg, &v)
		return
	}
	name := "bit arithmetic"
	if len(p) > 0 {
		name = "bit arithmetic on " + p[0].v.describe()
	}
	s.store(e.Dreg, &value{n: n, name: name})
}
