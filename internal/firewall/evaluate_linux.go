// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
	nft "github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// verdict is what rules do with a packet, as a set of what is possible.
type verdict uint8

const (
	accepts verdict = 1 << iota
	drops
	unsure = accepts | drops
)

// decide returns what the rules do with the first packet of another machine to a port, and
// the chain that decides: empty if no chain is about incoming packets.
func (rs *ruleset) decide(slot port.Slot, v6 bool) (result verdict, by string) {
	result = accepts
	if rs.legacy {
		result, by = unsure, "the filter table of iptables-legacy"
	}
	for _, c := range rs.inputs(v6) {
		e := evaluation{rs: rs, slot: slot, family: family(v6)}
		possible, passes := e.chain(c, 0)
		if passes {
			policy := accepts
			if c.hook.Drop {
				policy = drops
			}
			possible |= policy
		}
		name := c.name()
		switch {
		case possible == drops:
			return drops, name
		case possible == unsure:
			result, by = unsure, name
		case by == "":
			by = name
		}
	}
	return result, by
}

// evaluation follows a packet through the rules.
type evaluation struct {
	rs     *ruleset
	slot   port.Slot
	family uint8
	steps  int
}

const (
	maxDepth = 16 // of jumps; the kernel allows as many
	maxSteps = 100000
)

// chain returns what the rules of a chain may do, and whether the packet may get behind them.
func (e *evaluation) chain(c *chain, depth int) (possible verdict, passes bool) {
	if depth > maxDepth {
		return unsure, true
	}
	for _, exprs := range c.rules {
		if e.steps++; e.steps > maxSteps {
			return unsure, true
		}
		matched, v := e.rule(c.id.Table, exprs)
		if matched == no || v == nil {
			continue
		}
		out, next, leaves := e.follow(c.id.Table, *v, depth)
		possible |= out
		passes = passes || leaves
		if matched == yes && !next {
			return possible, passes
		}
	}
	return possible, true
}

// follow returns what a verdict leads to, whether the next rule may be reached, and whether
// the chain may be left without a decision.
func (e *evaluation) follow(t nft.TableID, v nft.Verdict, depth int) (out verdict, next, leaves bool) {
	switch v.Code {
	case nft.VerdictAccept:
		return accepts, false, false
	case nft.VerdictDrop:
		return drops, false, false
	case nft.VerdictReturn:
		return 0, false, true
	case nft.VerdictContinue, nft.VerdictBreak:
		return 0, true, false
	}
	c := e.rs.chain(nft.ChainID{Table: t, Name: v.Chain})
	switch {
	case c != nil && v.Code == nft.VerdictJump:
		out, next = e.chain(c, depth+1)
		return out, next, false
	case c != nil && v.Code == nft.VerdictGoto:
		out, leaves = e.chain(c, depth+1)
		return out, false, leaves
	}
	return unsure, false, false // a queue, or what is not understood
}

// unknown is the verdict of what is not understood.
var unknown = nft.Verdict{Code: 3} // NF_QUEUE

// match is whether a rule is about the packet.
type match uint8

const (
	no match = iota
	maybe
	yes
)

func isTrue(b bool) match {
	if b {
		return yes
	}
	return no
}

// value is what a register holds: known bytes, or something about the interface.
type value struct {
	bytes []byte // nil if unknown
	iface bool
}

// stateNew is the bit of a new connection (NF_CT_STATE_BIT(IP_CT_NEW)).
const stateNew = 8

// rule returns whether a rule is about the packet, and its verdict: nil if it has none.
func (e *evaluation) rule(t nft.TableID, exprs []any) (match, *nft.Verdict) {
	result, regs := yes, make(map[uint32]value)
	var v *nft.Verdict
	for _, x := range exprs {
		m := yes
		switch x := x.(type) {
		case nft.Pass:
		case nft.Immediate:
			v = x.Verdict
			regs[x.Dreg] = value{bytes: x.Data}
		case nft.Payload, nft.Meta, nft.Ct:
			e.load(regs, x)
		case nft.Bitwise:
			regs[x.Dreg] = masked(regs[x.Sreg], x)
		case nft.Cmp:
			m = compare(regs[x.Sreg], x)
		case nft.Range:
			m = inRange(regs[x.Sreg], x)
		case nft.Lookup:
			var found *nft.Verdict
			if m, found = e.lookup(t, regs[x.Sreg], x); found != nil {
				v = found
			}
			if x.HasDreg {
				regs[x.Dreg] = value{}
			}
		case nft.Match:
			m = e.xtables(t, x)
		case nft.Target:
			m, v = target(x, v)
		case nft.Other:
			m, v = other(x.Name, v)
		default:
			m = maybe
		}
		result = min(result, m)
		if result == no {
			return no, nil
		}
	}
	return result, v
}

// load puts what an expression loads into its register.
func (e *evaluation) load(regs map[uint32]value, x any) {
	switch x := x.(type) {
	case nft.Payload:
		regs[x.Dreg] = value{}
		if x.Base == nft.PayloadTransport && x.Offset == 2 && x.Length == 2 {
			regs[x.Dreg] = value{bytes: binary.BigEndian.AppendUint16(nil, e.slot.Port)}
		}
	case nft.Meta:
		switch x.Key {
		case nft.MetaL4proto:
			regs[x.Dreg] = value{bytes: []byte{byte(e.slot.Protocol)}}
		case nft.MetaNfproto:
			regs[x.Dreg] = value{bytes: []byte{e.family}}
		case nft.MetaIif, nft.MetaIifname:
			regs[x.Dreg] = value{iface: true}
		default:
			regs[x.Dreg] = value{}
		}
	case nft.Ct:
		regs[x.Dreg] = value{}
		if x.Key == nft.CtKeyState {
			regs[x.Dreg] = value{bytes: binary.NativeEndian.AppendUint32(nil, stateNew)}
		}
	}
}

func masked(v value, x nft.Bitwise) value {
	if x.Op != 0 || len(v.bytes) == 0 || len(x.Mask) != len(v.bytes) || len(x.Xor) != len(v.bytes) {
		return value{}
	}
	out := make([]byte, len(v.bytes))
	for i := range out {
		out[i] = v.bytes[i]&x.Mask[i] ^ x.Xor[i]
	}
	return value{bytes: out}
}

func compare(v value, x nft.Cmp) match {
	if v.iface { // every one but lo
		lo := bytes.HasPrefix(x.Data, []byte("lo\x00")) || bytes.Equal(x.Data, binary.NativeEndian.AppendUint32(nil, 1))
		if !lo || x.Op > nft.CmpNeq {
			return maybe
		}
		return isTrue(x.Op == nft.CmpNeq)
	}
	if v.bytes == nil || len(x.Data) != len(v.bytes) {
		return maybe
	}
	c := bytes.Compare(v.bytes, x.Data)
	return isTrue(map[uint32]bool{
		nft.CmpEq: c == 0, nft.CmpNeq: c != 0, nft.CmpLt: c < 0, nft.CmpLte: c <= 0, nft.CmpGt: c > 0, nft.CmpGte: c >= 0,
	}[x.Op])
}

func inRange(v value, x nft.Range) match {
	if v.bytes == nil || len(x.From) != len(v.bytes) || len(x.To) != len(v.bytes) {
		return maybe
	}
	in := bytes.Compare(x.From, v.bytes) <= 0 && bytes.Compare(v.bytes, x.To) <= 0
	return isTrue(in == (x.Op == nft.CmpEq))
}

// lookup looks a known value up in a set of single values, or a map of verdicts.
func (e *evaluation) lookup(t nft.TableID, v value, x nft.Lookup) (match, *nft.Verdict) {
	set := e.rs.sets[setID{t, x.Set}]
	if set == nil || v.bytes == nil || set.Flags&nft.SetInterval != 0 || set.Changing() || set.Concat() || set.HasCatchall() {
		if x.HasDreg {
			return maybe, &unknown
		}
		return maybe, nil
	}
	for _, el := range set.Elements {
		if bytes.Equal(el.Key, v.bytes) {
			return isTrue(!x.Invert), el.Verdict
		}
	}
	return isTrue(x.Invert), nil
}

// xtables returns whether a match of iptables-nft is about the packet.
func (e *evaluation) xtables(t nft.TableID, x nft.Match) match {
	if x.Name == "comment" {
		return yes
	}
	d, err := x.Decode(t.Family == nft.FamilyIP6)
	if err != nil {
		return maybe
	}
	in := func(r nft.PortRange) bool { return r.First <= e.slot.Port && e.slot.Port <= r.Last }
	switch d := d.(type) {
	case nft.PortMatch:
		switch {
		case d.Proto != byte(e.slot.Protocol) || in(d.Dst) == d.NotDst:
			return no
		case !d.Src.All() || d.NotSrc || d.Option || d.FlagMask != 0:
			return maybe
		}
		return yes
	case nft.MultiportMatch:
		if !d.Dst {
			return maybe
		}
		return isTrue(slices.ContainsFunc(d.Ports, in) != d.Invert)
	case nft.StateMatch:
		return isTrue(d.States&stateNew != 0)
	case nft.ConntrackMatch:
		if d.Protocol.Asked || d.OrigDst.Asked || d.Port.Asked || d.Other || !d.State.Asked {
			return maybe
		}
		return isTrue((d.States&stateNew != 0) != d.State.Invert)
	}
	return maybe
}

// target returns what a target of iptables-nft does: it may pass the packet on.
func target(x nft.Target, v *nft.Verdict) (match, *nft.Verdict) {
	switch x.Name {
	case "REJECT", "DROP":
		return yes, &nft.Verdict{Code: nft.VerdictDrop}
	case "LOG", "NFLOG", "MARK", "CONNMARK":
		return yes, v
	}
	return maybe, &unknown
}

// other returns what an expression does that is not decoded. Those that limit a rule have
// no verdict of their own.
func other(name string, v *nft.Verdict) (match, *nft.Verdict) {
	switch name {
	case "reject":
		return yes, &nft.Verdict{Code: nft.VerdictDrop}
	case "queue", "synproxy", "tproxy", "fwd":
		return maybe, &unknown
	}
	return maybe, v
}
