// SPDX-License-Identifier: Apache-2.0

package nat

import "testing"

// whole compiles one rule in every place where rules can be.
func whole(raw []byte, legacy, v6 bool) {
	id := tableID{legacy: legacy, family: famInet, name: "nat"}
	if legacy {
		id.family = famIP
		if v6 {
			id.family = famIP6
		}
	}
	t := &tableSnap{id: id, chains: baseChains()}
	for _, ch := range t.chains {
		ch.rules = []ruleSnap{{handle: 1, raw: raw}}
	}
	t.sets = []*nset{{name: "v", flags: setMap, keyLen: 2, elems: map[string]element{"": {key: []byte{0, 80}}}}}
	c := compiled(&snapshot{tables: []*tableSnap{t}})
	c.problems(10)
	for _, b := range c.bindings() {
		if b.Port == 0 || !b.Address.IsValid() || b.Detail == "" {
			panic("a binding that cannot be")
		}
	}
}

func FuzzRule(f *testing.F) {
	f.Add(join(xTCP(), xIif("docker0", cmpNeq), xDaddr("192.0.2.2"), xDport(80), xDNAT("10.0.0.1", 80)))
	f.Add(join(xTCP(), xPayload(2, 0, 4, 1), xLookup("v", 1, 0)))
	f.Add(rawExpr("match", appendAttr(nil, 1, []byte("tcp\x00")), num(2, 0), appendAttr(nil, 3, make([]byte, 16))))
	f.Add(rawExpr("target", appendAttr(nil, 1, []byte("DNAT\x00")), num(2, 2), appendAttr(nil, 3, make([]byte, 48))))
	f.Fuzz(func(t *testing.T, b []byte) {
		raw, err := normalExprs(b)
		if err != nil {
			return
		}
		whole(raw, false, false)
	})
}

func FuzzMessage(f *testing.F) {
	f.Add(uint8(msgNewRule), uint16(nlmAppend), join([]byte{2, 0, 0, 0}, appendAttr(nil, 1, []byte("nat\x00")), appendAttr(nil, 4, xTCP())))
	f.Add(uint8(msgNewChain), uint16(0), join([]byte{2, 0, 0, 0}, appendAttr(nil, 3, []byte("pre\x00")), appendAttr(nil, 4, join(num(1, 0), num(2, 5)))))
	f.Add(uint8(msgNewElem), uint16(0), join([]byte{2, 0, 0, 0}, appendAttr(nil, 3, appendAttr(nil, 1, data(1, []byte{0, 80})))))
	f.Add(uint8(msgNewGen), uint16(0), join([]byte{0, 0, 0, 0}, num(1, 7)))
	f.Fuzz(func(t *testing.T, typ uint8, flags uint16, b []byte) {
		msg, err := parseMessage(typ, flags, b)
		if err != nil {
			return
		}
		s := bigSnapshot(3)
		m := mirror{c: newCompiler(16)}
		m.c.setHost(testHost())
		m.load(s)
		m.c.commit()
		if err := m.commit([]*message{msg}, 1); err == nil {
			m.c.commit()
		}
	})
}

func FuzzLegacyTable(f *testing.F) {
	f.Add(false, uint32(0), []byte{})
	f.Add(false, uint32(0), legacySample(false))
	f.Add(true, uint32(0), legacySample(true))
	f.Fuzz(func(t *testing.T, v6 bool, hook uint32, b []byte) {
		snap, err := parseLegacy(v6, legacyInfo{validHooks: 0x1b, hook: [5]uint32{0, hook, 0, hook, 0}}, b)
		if err != nil {
			return
		}
		for _, c := range snap.chains {
			for _, r := range c.rules {
				whole(r.raw, true, v6)
			}
		}
		compiled(&snapshot{tables: []*tableSnap{snap}})
	})
}

// legacySample is a table of one rule, a policy and an end.
func legacySample(v6 bool) []byte {
	l := entryLayoutOf(v6)
	entry := func(target string, data []byte) []byte {
		to := l.size
		n := to + xtHeaderLen + len(data)
		b := make([]byte, n)
		le16 := func(off int, v int) { b[off], b[off+1] = byte(v), byte(v>>8) }
		le16(l.targetOff, to)
		le16(l.targetOff+2, n)
		copy(b[to+2:], target)
		copy(b[to+xtHeaderLen:], data)
		return b
	}
	dnat := make([]byte, 48)
	dnat[0] = natMapIPs
	return join(entry("DNAT", dnat), entry("", []byte{0xfe, 0xff, 0xff, 0xff, 0, 0, 0, 0}), entry("ERROR", make([]byte, 32)))
}
