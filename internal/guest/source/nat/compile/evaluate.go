// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port/compact"
)

// evaluation is what one rule does, seen alone: the branches in which it ends,
// each with the packets that take it.
type evaluation struct {
	branches branches
	sets     []*namedSet  // that were read
	split    *namedSet    // the one set whose elements are the branches' keys, if so
	most     compact.Peak // of branches

	inert     bool // no branch jumps or decides
	tooMany   bool
	testsMark bool // what it does depends on the packet mark
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
	why   string // what is not understood: of endNat, where it leads
}

const maxBranches = 1 << 17

// env is what a rule's evaluation needs to know of the machine.
type env struct {
	links map[uint32]string
	// marked says that a rule sets the packet mark, so that a new connection
	// need not have the mark 0.
	marked bool
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

	testsMark bool
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
	n := &natAction{random: e.Flags&ruleset.NATRandom != 0}
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

// evaluate evaluates rule r for one family. With only, just the branches of
// those elements of the set that splits it.
func evaluate(r *rule, v6 bool, ev *env, only map[string]struct{}) *evaluation {
	e := &evaluator{
		out:  &evaluation{inert: true},
		sets: r.chain.table.sets, only: only,
	}
	first := &state{v6: v6, m: everything(), env: ev}
	exprs, err := ruleset.ParseRule(r.chain.table.id, r.raw)
	if err != nil {
		first.blind(err.Error())
		e.end(first, branchEnd{kind: endUnknown, why: err.Error()})
		return e.out
	}
	states := []*state{first}
	for _, x := range exprs {
		if l, ok := x.(ruleset.Lookup); ok {
			states = e.lookup(states, l)
		} else {
			states = e.step(states, x)
		}
	}
	e.finish()
	return e.out
}

// evaluator evaluates one rule.
type evaluator struct {
	out    *evaluation
	sets   map[string]*namedSet
	only   map[string]struct{}
	reads  map[*namedSet]int // how often each set is read
	splits int               // lookups that lead to a branch for each element
}

// end ends a state's way through the rule.
func (e *evaluator) end(s *state, end branchEnd) {
	e.note(s)
	if s.m.Empty() || end.kind == endNone {
		return
	}
	e.out.inert = false
	if e.out.branches.len() >= maxBranches {
		e.out.tooMany = true
		return
	}
	e.out.branches.put(s.key, &branch{m: s.m, end: end})
}

// note keeps what a state has to do with the packet mark.
func (e *evaluator) note(s *state) {
	e.out.testsMark = e.out.testsMark || s.testsMark
}

// step runs an expression in each state and returns those that go on.
func (e *evaluator) step(states []*state, x any) []*state {
	next := states[:0]
	for _, s := range states {
		if end, stop := s.step(x); stop {
			e.end(s, end)
		} else if e.note(s); !s.m.Empty() {
			next = append(next, s)
		}
	}
	return next
}

// lookup runs a lookup in each state and returns those that go on.
func (e *evaluator) lookup(states []*state, l ruleset.Lookup) []*state {
	n := e.sets[l.Set]
	var only map[string]struct{}
	if n != nil {
		if e.reads == nil {
			e.reads = make(map[*namedSet]int)
		}
		e.reads[n]++
		if l.HasDreg || len(states) > 0 && states[0].keyParts(l, n) > 1 && !l.Invert {
			e.splits++
			e.out.split, only = n, e.only
		}
	}
	var next []*state
	for _, s := range states {
		s.lookup(l, n, only, func(s *state, v *ruleset.Verdict) {
			e.note(s)
			switch {
			case s.m.Empty():
				return
			case len(next) >= maxBranches:
				e.out.tooMany = true
				return
			case v != nil:
				if end, stop := verdictEnd(*v); stop {
					e.end(s, end)
					return
				}
			case l.HasDreg && l.Dreg == 0:
				e.end(s, branchEnd{kind: endUnknown, why: "a verdict of @" + l.Set})
				return
			}
			next = append(next, s)
		})
	}
	return next
}

// finish notes which sets were read, and whether the branches are those of the
// elements of a single set, so that each can be evaluated alone.
func (e *evaluator) finish() {
	for n := range e.reads {
		e.out.sets = append(e.out.sets, n)
	}
	n := e.out.split
	if n == nil {
		return
	}
	intervals := n.Flags&ruleset.SetInterval != 0 && !n.Concat() // elements depend on their neighbours
	if e.splits != 1 || e.reads[n] > 1 || intervals || n.HasCatchall() {
		e.out.split = nil
	}
}

// keyParts returns of how many fields the key of a lookup consists.
func (s *state) keyParts(l ruleset.Lookup, n *namedSet) int {
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

// step runs one expression; stop means that the rule ends here.
func (s *state) step(x any) (end branchEnd, stop bool) {
	switch e := x.(type) {
	case ruleset.Immediate:
		if e.Verdict != nil {
			return verdictEnd(*e.Verdict)
		}
		s.store(e.Dreg, &value{kind: valConst, data: e.Data, n: len(e.Data)})
	case ruleset.StandardTarget:
		return verdictEnd(e.Verdict)
	case ruleset.Payload:
		switch {
		case e.Sreg == 0:
			s.load(x)
		case s.changesField(e):
			return branchEnd{kind: endUnknown, why: "a payload that is written"}, true
		}
	case ruleset.NAT:
		return s.nat(e)
	case ruleset.Redirect:
		n := &natAction{redirect: true, random: e.Flags&ruleset.NATRandom != 0}
		if why := s.natPorts(n, e.ProtoMin, e.ProtoMax); why != "" {
			return branchEnd{kind: endNat, why: why}, true
		}
		return branchEnd{kind: endNat, nat: n}, true
	case ruleset.Target:
		return s.target(e)
	case ruleset.Other:
		return s.other(e.Name)
	case ruleset.Cmp:
		s.cmp(e)
	case ruleset.Range:
		s.inSpan(e)
	case ruleset.Header:
		s.header(e)
	case ruleset.Match:
		s.match(e)
	case ruleset.Dynset:
		if e.Conditional {
			s.blind("an update of @" + e.Set + " that is a condition")
		}
	case ruleset.Pass:
	default:
		s.load(x)
	}
	return branchEnd{}, false
}

// other returns what an expression does that is not decoded. One that is none of the
// kernel's conditions may translate, as the fullcone of OpenWrt does.
func (s *state) other(name string) (end branchEnd, stop bool) {
	switch name {
	case "limit", "quota", "connlimit", "rt", "exthdr", "socket", "osf", "xfrm", "tunnel", "inner", ruleset.AnObject, ruleset.AChosenObject:
		s.blind(name)
		return branchEnd{}, false
	case "reject":
		return branchEnd{kind: endDrop}, true
	}
	return branchEnd{kind: endUnknown, why: name}, true
}
