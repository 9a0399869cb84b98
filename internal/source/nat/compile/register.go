// SPDX-License-Identifier: Apache-2.0

package compile

import "github.com/fairlead/fairlead/internal/source/nat/ruleset"

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
