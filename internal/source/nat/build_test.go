// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"encoding/binary"
	"net/netip"
)

// Builders of rules as the kernel gives them.

func u32(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }

func rawExpr(name string, attrs ...[]byte) []byte {
	var data []byte
	for _, a := range attrs {
		data = append(data, a...)
	}
	e := appendAttr(nil, attrExprName, append([]byte(name), 0))
	return appendAttr(nil, attrListElem, appendAttr(e, attrExprData, data))
}

func num(typ uint16, v uint32) []byte { return appendAttr(nil, typ, u32(v)) }

func data(typ uint16, v []byte) []byte {
	return appendAttr(nil, typ, appendAttr(nil, attrDataValue, v))
}

func xPayload(base, off, n, dreg uint32) []byte {
	return rawExpr("payload", num(1, dreg), num(2, base), num(3, off), num(4, n))
}

func xMeta(key, dreg uint32) []byte { return rawExpr("meta", num(2, key), num(1, dreg)) }

func xCmp(op, sreg uint32, v []byte) []byte {
	return rawExpr("cmp", num(1, sreg), num(2, op), data(3, v))
}

func xImmediate(dreg uint32, v []byte) []byte { return rawExpr("immediate", num(1, dreg), data(2, v)) }

func xVerdict(code int32, chain string) []byte {
	v := num(attrVerdictCode, uint32(code))
	if chain != "" {
		v = append(v, appendAttr(nil, attrVerdictChain, append([]byte(chain), 0))...)
	}
	return rawExpr("immediate", num(1, 0), appendAttr(nil, 2, appendAttr(nil, attrDataVerdict, v)))
}

func xLookup(set string, sreg uint32, dreg int) []byte {
	attrs := [][]byte{appendAttr(nil, 1, append([]byte(set), 0)), num(2, sreg)}
	if dreg >= 0 {
		attrs = append(attrs, num(3, uint32(dreg)))
	}
	return rawExpr("lookup", attrs...)
}

func join(parts ...[]byte) []byte {
	var out []byte
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func be16(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }

func xTCP() []byte { return join(xMeta(metaL4proto, 1), xCmp(cmpEq, 1, []byte{6})) }

func xDport(p uint16) []byte { return join(xPayload(2, 2, 2, 1), xCmp(cmpEq, 1, be16(p))) }

func xDaddr(a string) []byte {
	return join(xPayload(1, 16, 4, 1), xCmp(cmpEq, 1, netip.MustParseAddr(a).AsSlice()))
}

func xIif(name string, op uint32) []byte {
	b := make([]byte, 16)
	copy(b, name)
	return join(xMeta(metaIifname, 1), xCmp(op, 1, b))
}

func xDNAT(a string, p uint16) []byte {
	return join(xImmediate(1, netip.MustParseAddr(a).AsSlice()), xImmediate(2, be16(p)),
		rawExpr("nat", num(1, 1), num(2, famIP), num(3, 1), num(5, 2)))
}

func testHost() host {
	return host{
		links: map[uint32]string{1: "lo", 2: "eth0", 3: "docker0"},
		local: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("172.17.0.1/32"),
			netip.MustParsePrefix("192.0.2.2/32"), netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("2001:db8::2/128")},
		nodes:    []netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("172.17.0.1"), netip.MustParseAddr("2001:db8::2")},
		uplinks:  []string{"eth0"},
		loopback: []string{"lo"},
	}
}

var natTable = tableID{family: famIP, name: "nat"}

func baseChains() []*chainSnap {
	return []*chainSnap{
		{name: "pre", hook: &hookPoint{num: hookPrerouting, prio: -100, typ: "nat"}},
		{name: "out", hook: &hookPoint{num: hookOutput, prio: -100, typ: "nat"}},
	}
}
