// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/leak"
)

// FuzzXtables reads the binary data of the extensions of xtables.
func FuzzXtables(f *testing.F) {
	for _, name := range []string{"tcp", "udp", "multiport", "addrtype", "conntrack", "state", "mark", "recent"} {
		for revision := range uint8(4) {
			f.Add(name, revision, make([]byte, 48), false)
			f.Add(name, revision, make([]byte, 200), true)
		}
	}
	f.Add("DNAT", uint8(2), make([]byte, 48), true)
	f.Add("REDIRECT", uint8(0), append([]byte{1, 0, 0, 0, 2, 0, 0, 0}, make([]byte, 12)...), false)
	table := TableID{Family: FamilyIP, Name: "nat"}
	f.Fuzz(func(t *testing.T, name string, revision uint8, info []byte, v6 bool) {
		if m, err := (Match{Name: name, Revision: revision, Info: info}).Decode(v6); err != nil && m != nil {
			t.Errorf("%+v with %v", m, err)
		}
		n, err := (Target{Name: name, Revision: revision, Info: info}).DecodeNAT(v6)
		if err == nil && n.Addrs.First.IsValid() && n.Addrs.First.Is4() == v6 {
			t.Errorf("address %s, IPv6 %v", n.Addrs.First, v6)
		}
		_ = Text(table, info)
	})
}

func FuzzLegacyInfo(f *testing.F) {
	f.Add(make([]byte, 84))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = ParseLegacyInfo(b) })
}

func TestMain(m *testing.M) { leak.Main(m) }

func TestDestroyedObjectsAreDeleted(t *testing.T) {
	body := append([]byte{FamilyIP, 0, 0, 0}, AppendAttr(nil, 1, []byte("nat\x00"))...)
	for typ, want := range map[uint8]uint8{26: MsgDelTable, 27: MsgDelChain, 28: MsgDelRule, 29: MsgDelSet, 30: MsgDelElem} {
		m, err := ParseMessage(typ, 0, body)
		if err != nil || m.Type != want || m.Table.Name != "nat" {
			t.Errorf("type %d: %+v, %v", typ, m, err)
		}
	}
}
