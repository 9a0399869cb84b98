// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"encoding/binary"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

// whole compiles one rule in every place where rules can be.
func whole(raw []byte, legacy, v6 bool) {
	id := ruleset.TableID{Legacy: legacy, Family: ruleset.FamilyInet, Name: "nat"}
	if legacy {
		id.Family = ruleset.FamilyIP
		if v6 {
			id.Family = ruleset.FamilyIP6
		}
	}
	t := &ruleset.Table{ID: id, Chains: natrules.BaseChains()}
	for _, ch := range t.Chains {
		ch.Rules = []ruleset.Rule{{Handle: 1, Raw: raw}}
	}
	t.Sets = []*ruleset.Set{{Name: "v", Flags: ruleset.SetMap, KeyLen: 2, Elements: map[string]ruleset.Element{"": {Key: []byte{0, 80}}}}}
	c := compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{t}})
	c.Problems(10)
	for _, b := range c.Bindings() {
		if b.Port == 0 || !b.Address.IsValid() || b.Detail.String() == "" {
			panic("a binding that cannot be")
		}
	}
}

func FuzzRule(f *testing.F) {
	f.Add(natrules.Join(natrules.TCP(), natrules.In("docker0", ruleset.CmpNeq), natrules.Daddr("192.0.2.2"), natrules.Dport(80), natrules.DNAT("10.0.0.1", 80)))
	f.Add(natrules.Join(natrules.TCP(), natrules.Payload(2, 0, 4, 1), natrules.Lookup("v", 1, 0)))
	f.Add(natrules.Expr("match", ruleset.AppendAttr(nil, 1, []byte("tcp\x00")), natrules.Num(2, 0), ruleset.AppendAttr(nil, 3, make([]byte, 16))))
	f.Add(natrules.Expr("target", ruleset.AppendAttr(nil, 1, []byte("DNAT\x00")), natrules.Num(2, 2), ruleset.AppendAttr(nil, 3, make([]byte, 48))))
	f.Fuzz(func(t *testing.T, b []byte) {
		raw, err := ruleset.NormalExprs(b)
		if err != nil {
			return
		}
		whole(raw, false, false)
	})
}

func FuzzMessage(f *testing.F) {
	f.Add(uint8(ruleset.MsgNewRule), uint16(ruleset.NLMAppend), natrules.Join([]byte{2, 0, 0, 0}, ruleset.AppendAttr(nil, 1, []byte("nat\x00")), ruleset.AppendAttr(nil, 4, natrules.TCP())))
	f.Add(uint8(ruleset.MsgNewChain), uint16(0), natrules.Join([]byte{2, 0, 0, 0}, ruleset.AppendAttr(nil, 3, []byte("pre\x00")), ruleset.AppendAttr(nil, 4, natrules.Join(natrules.Num(1, 0), natrules.Num(2, 5)))))
	f.Add(uint8(ruleset.MsgNewElem), uint16(0), natrules.Join([]byte{2, 0, 0, 0}, ruleset.AppendAttr(nil, 3, ruleset.AppendAttr(nil, 1, natrules.Data(1, []byte{0, 80})))))
	f.Add(uint8(ruleset.MsgNewGen), uint16(0), natrules.Join([]byte{0, 0, 0, 0}, natrules.Num(1, 7)))
	f.Fuzz(func(t *testing.T, typ uint8, flags uint16, b []byte) {
		msg, err := ruleset.ParseMessage(typ, flags, b)
		if err != nil {
			return
		}
		s := bigSnapshot(3)
		m := Mirror{c: New(16)}
		m.c.SetHost(testHost())
		m.Load(s)
		m.c.Commit()
		if err := m.Commit([]*ruleset.Message{msg}, 1); err == nil {
			m.c.Commit()
		}
	})
}

func FuzzLegacyTable(f *testing.F) {
	info := make([]byte, 84)
	binary.NativeEndian.PutUint32(info[32:], 0x1b) // hooks that nat tables have
	f.Add(false, info, []byte{})
	f.Add(false, info, natrules.LegacyTable(false))
	f.Add(true, info, natrules.LegacyTable(true))
	f.Fuzz(func(t *testing.T, v6 bool, about, b []byte) {
		info, err := ruleset.ParseLegacyInfo(about)
		if err != nil {
			return
		}
		snap, err := ruleset.ParseLegacy(v6, info, b)
		if err != nil {
			return
		}
		for _, c := range snap.Chains {
			for _, r := range c.Rules {
				whole(r.Raw, true, v6)
			}
		}
		compiled(&ruleset.Snapshot{Tables: []*ruleset.Table{snap}})
	})
}
