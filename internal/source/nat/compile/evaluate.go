// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
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

// nat reads a native nat expression.
func (s *state) nat(e ruleset.NAT) (branchEnd, bool) {
	if e.Kind != 1 {
		return branchEnd{}, false // source NAT; the destination stays
	}
	n := &natAction{}
	bad := func(why string) (branchEnd, bool) { return branchEnd{kind: endNat, why: why}, true }
	if e.Flags&ruleset.NATNetmap != 0 {
		return bad("a prefix mapping")
	}
	if e.AddrMin != 0 {
		size := 4
		if e.Family == ruleset.FamilyIP6 {
			size = 16
		}
		if (e.Family == ruleset.FamilyIP6) != s.v6 {
			return branchEnd{}, false // never reached by this family
		}
		lo, ok := s.constant(e.AddrMin, size)
		if !ok {
			return bad("an address that is not constant")
		}
		hi := lo
		if e.AddrMax != 0 && e.AddrMax != e.AddrMin {
			if hi, ok = s.constant(e.AddrMax, size); !ok {
				return bad("an address that is not constant")
			}
		}
		a, _ := netip.AddrFromSlice(lo)
		b, _ := netip.AddrFromSlice(hi)
		n.setAddrs(ruleset.AddrRange{First: a, Last: b})
	}
	if why := s.natPorts(n, e.ProtoMin, e.ProtoMax); why != "" {
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
	exprs, err := ruleset.ParseRule(t.id, r.raw)
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
		if l, ok := x.(ruleset.Lookup); ok {
			n := t.sets[l.Set]
			if n != nil {
				reads[n]++
			}
			branching := n != nil && (l.HasDreg || len(states) > 0 && s0Parts(states[0], l, n) > 1 && !l.Invert)
			if branching {
				splits++
				out.split = n
			}
			var next []*state
			for _, s := range states {
				s.lookup(l, n, pick(branching, only), func(s *state, v *ruleset.Verdict) {
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
	if splits != 1 || out.split != nil && (out.split.Flags&ruleset.SetInterval != 0 && !out.split.Concat() || out.split.HasCatchall()) {
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

func s0Parts(s *state, l ruleset.Lookup, n *namedSet) int {
	parts := 0
	for _, p := range s.read(l.Sreg, n.KeyLen) {
		parts += len(s.splitPiece(p))
	}
	return parts
}

func verdictEnd(v ruleset.Verdict) (branchEnd, bool) {
	switch v.Code {
	case ruleset.VerdictAccept:
		return branchEnd{kind: endAccept}, true
	case ruleset.VerdictDrop:
		return branchEnd{kind: endDrop}, true
	case ruleset.VerdictReturn:
		return branchEnd{kind: endReturn}, true
	case ruleset.VerdictJump:
		return branchEnd{kind: endJump, chain: v.Chain}, true
	case ruleset.VerdictGoto:
		return branchEnd{kind: endGoto, chain: v.Chain}, true
	case ruleset.VerdictContinue, ruleset.VerdictBreak:
		return branchEnd{}, v.Code == ruleset.VerdictBreak
	}
	return branchEnd{kind: endUnknown, why: fmt.Sprintf("verdict %d", v.Code)}, true
}

// step runs one expression; stop says that the rule ends here.
func (s *state) step(x any) (end branchEnd, stop bool) {
	switch e := x.(type) {
	case ruleset.Immediate:
		if e.Verdict != nil {
			return verdictEnd(*e.Verdict)
		}
		s.store(e.Dreg, &value{kind: valConst, data: e.Data, n: len(e.Data)})
	case ruleset.StandardTarget:
		return verdictEnd(e.Verdict)
	case ruleset.Cmp:
		s.cmp(e)
	case ruleset.Range:
		parts := s.read(e.Sreg, len(e.From))
		if len(parts) != 1 || len(e.From) != len(e.To) {
			s.blind(describePieces(parts))
			break
		}
		n := s.between(parts[0], e.From, e.To)
		if n.f == fieldBool && n.truth >= 0 && !bytes.Equal(e.From, e.To) {
			n = narrowing{why: parts[0].v.describe()}
		}
		s.apply(n, e.Op == ruleset.CmpNeq)
	case ruleset.Payload:
		if e.Sreg == 0 && e.Length <= 64 && e.Offset < 1<<16 {
			s.store(e.Dreg, &value{kind: valPayload, key: e.Base, off: int(e.Offset), n: int(e.Length),
				name: fmt.Sprintf("payload @%d,%d,%d", e.Base, e.Offset*8, e.Length*8)})
		} else if e.Sreg != 0 {
			return branchEnd{kind: endUnknown, why: "a payload that is written"}, true
		}
	case ruleset.Meta:
		if e.Sreg != 0 {
			break // marks the packet
		}
		n := 4
		switch e.Key {
		case ruleset.MetaIifname, ruleset.MetaOifname:
			n = 16
		case ruleset.MetaNfproto, ruleset.MetaL4proto:
			n = 1
		case ruleset.MetaProtocol:
			n = 2
		}
		name, ok := ruleset.MetaNames[e.Key]
		if !ok {
			name = fmt.Sprintf("meta %d", e.Key)
		}
		s.store(e.Dreg, &value{kind: valMeta, key: e.Key, n: n, name: name})
	case ruleset.Ct:
		if e.Sreg != 0 {
			break
		}
		v := &value{kind: valCt, key: e.Key, n: 4, name: fmt.Sprintf("ct key %d", e.Key)}
		switch {
		case e.Key == ruleset.CtKeyState:
			v.name = "ct state"
		case e.Dir != 0:
			v.kind, v.n = valUnknown, 16
		case e.Key == ruleset.CtKeyProtocol:
			v.n = 1
		case e.Key == ruleset.CtKeyProtoDst:
			v.n = 2
		case e.Key == ruleset.CtKeyDstIP6 || e.Key == ruleset.CtKeyDst && s.v6:
			v.n = 16
		case e.Key != ruleset.CtKeyDst && e.Key != ruleset.CtKeyDstIP:
			v.kind = valUnknown
		}
		s.store(e.Dreg, v)
	case ruleset.Fib:
		v := &value{kind: valFib, key: e.Flags, n: 4, name: "fib"}
		if e.Result != ruleset.FibAddrtype {
			v.kind, v.n = valUnknown, 16
		}
		s.store(e.Dreg, v)
	case ruleset.Bitwise:
		s.bitwise(e)
	case ruleset.Byteorder:
		if p := s.read(e.Sreg, int(min(e.Length, 64))); len(p) == 1 && p[0].v.kind == valConst {
			break
		}
		if e.Sreg != e.Dreg || e.Length > 1 {
			s.store(e.Dreg, &value{n: int(min(e.Length, 64)), name: "a number in another byte order"})
		}
	case ruleset.Numgen:
		s.store(e.Dreg, &value{kind: valAny, n: 4, name: e.What})
	case ruleset.NAT:
		return s.nat(e)
	case ruleset.Redirect:
		n := &natAction{redirect: true}
		if why := s.natPorts(n, e.ProtoMin, e.ProtoMax); why != "" {
			return branchEnd{kind: endNat, why: why}, true
		}
		return branchEnd{kind: endNat, nat: n}, true
	case ruleset.Pass:
	case ruleset.Header:
		s.header(e)
	case ruleset.Match:
		s.match(e)
	case ruleset.Target:
		return s.target(e)
	case ruleset.Other:
		switch e.Name {
		case "masq", "objref", "dynset":
		case "queue", "tproxy", "reject", "fwd", "synproxy":
			return branchEnd{kind: endUnknown, why: e.Name}, true
		default:
			s.blind(e.Name)
		}
	}
	return branchEnd{}, false
}

func (s *state) bitwise(e ruleset.Bitwise) {
	n := int(min(e.Length, 64))
	p := s.read(e.Sreg, n)
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
