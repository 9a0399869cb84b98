// SPDX-License-Identifier: Apache-2.0

// Package natrules builds NAT rules for tests, in the bytes that the kernel gives
// them. Expressions are joined to rules by Join.
package natrules

import (
	"encoding/binary"
	"net/netip"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

func u32(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }

// Expr is any expression with its attributes.
func Expr(name string, attrs ...[]byte) []byte {
	var data []byte
	for _, a := range attrs {
		data = append(data, a...)
	}
	e := ruleset.AppendAttr(nil, ruleset.AttrExprName, append([]byte(name), 0))
	return ruleset.AppendAttr(nil, ruleset.AttrListElem, ruleset.AppendAttr(e, ruleset.AttrExprData, data))
}

// Num is an attribute that holds a number.
func Num(typ uint16, v uint32) []byte { return ruleset.AppendAttr(nil, typ, u32(v)) }

// Data is an attribute that holds a constant.
func Data(typ uint16, v []byte) []byte {
	return ruleset.AppendAttr(nil, typ, ruleset.AppendAttr(nil, ruleset.AttrDataValue, v))
}

// Payload loads n bytes of a header.
func Payload(base, off, n, dreg uint32) []byte {
	return Expr("payload", Num(1, dreg), Num(2, base), Num(3, off), Num(4, n))
}

// Meta loads a property of the packet.
func Meta(key, dreg uint32) []byte { return Expr("meta", Num(2, key), Num(1, dreg)) }

// Cmp compares a register.
func Cmp(op, sreg uint32, v []byte) []byte {
	return Expr("cmp", Num(1, sreg), Num(2, op), Data(3, v))
}

// Immediate loads a constant.
func Immediate(dreg uint32, v []byte) []byte { return Expr("immediate", Num(1, dreg), Data(2, v)) }

// Verdict ends the rule.
func Verdict(code int32, chain string) []byte {
	v := Num(ruleset.AttrVerdictCode, uint32(code))
	if chain != "" {
		v = append(v, ruleset.AppendAttr(nil, ruleset.AttrVerdictChain, append([]byte(chain), 0))...)
	}
	return Expr("immediate", Num(1, 0), ruleset.AppendAttr(nil, 2, ruleset.AppendAttr(nil, ruleset.AttrDataVerdict, v)))
}

// Lookup looks a register up in a set, or in a map if dreg is not negative.
func Lookup(set string, sreg uint32, dreg int) []byte {
	attrs := [][]byte{ruleset.AppendAttr(nil, 1, append([]byte(set), 0)), Num(2, sreg)}
	if dreg >= 0 {
		attrs = append(attrs, Num(3, uint32(dreg)))
	}
	return Expr("lookup", attrs...)
}

// Join makes one rule of expressions.
func Join(parts ...[]byte) []byte {
	var out []byte
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

// Port is a port in network byte order.
func Port(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }

// TCP matches TCP.
func TCP() []byte { return Join(Meta(ruleset.MetaL4proto, 1), Cmp(ruleset.CmpEq, 1, []byte{6})) }

// Dport matches a destination port.
func Dport(p uint16) []byte { return Join(Payload(2, 2, 2, 1), Cmp(ruleset.CmpEq, 1, Port(p))) }

// Daddr matches a destination address.
func Daddr(a string) []byte {
	return Join(Payload(1, 16, 4, 1), Cmp(ruleset.CmpEq, 1, netip.MustParseAddr(a).AsSlice()))
}

// ToLocal matches destinations that are addresses of this machine.
func ToLocal() []byte {
	return Join(Expr("fib", Num(1, 1), Num(2, ruleset.FibAddrtype), Num(3, ruleset.FibDaddr)),
		Cmp(ruleset.CmpEq, 1, binary.NativeEndian.AppendUint32(nil, ruleset.RtnLocal)))
}

// In compares the input interface's name.
func In(name string, op uint32) []byte {
	b := make([]byte, 16)
	copy(b, name)
	return Join(Meta(ruleset.MetaIifname, 1), Cmp(op, 1, b))
}

// DNAT sends packets to an address and port.
func DNAT(a string, p uint16) []byte {
	return Join(Immediate(1, netip.MustParseAddr(a).AsSlice()), Immediate(2, Port(p)),
		Expr("nat", Num(1, 1), Num(2, ruleset.FamilyIP), Num(3, 1), Num(5, 2)))
}

// Table is the table "ip nat".
var Table = ruleset.TableID{Family: ruleset.FamilyIP, Name: "nat"}

// BaseChains are the chains "pre" and "out", at the prerouting and output hooks.
func BaseChains() []*ruleset.Chain {
	return []*ruleset.Chain{
		{Name: "pre", Hook: &ruleset.Hook{Num: ruleset.HookPrerouting, Priority: -100, Type: "nat"}},
		{Name: "out", Hook: &ruleset.Hook{Num: ruleset.HookOutput, Priority: -100, Type: "nat"}},
	}
}

// LegacyTable is a legacy table of one rule, a policy and an end.
func LegacyTable(v6 bool) []byte {
	size, targetOff := 112, 88 // struct ipt_entry
	if v6 {
		size, targetOff = 168, 140 // struct ip6t_entry
	}
	const header = 32 // struct xt_entry_target
	entry := func(target string, data []byte) []byte {
		n := size + header + len(data)
		b := make([]byte, n)
		binary.NativeEndian.PutUint16(b[targetOff:], uint16(size))
		binary.NativeEndian.PutUint16(b[targetOff+2:], uint16(n))
		copy(b[size+2:], target)
		copy(b[size+header:], data)
		return b
	}
	dnat := make([]byte, 48)
	dnat[0] = 1 // NF_NAT_RANGE_MAP_IPS
	return Join(entry("DNAT", dnat), entry("", []byte{0xfe, 0xff, 0xff, 0xff, 0, 0, 0, 0}), entry("ERROR", make([]byte, 32)))
}
