// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	nft "github.com/fairlead/fairlead/internal/source/nat/ruleset"
	"github.com/fairlead/fairlead/test/kit/natrules"
)

// FuzzDecide evaluates a rule, a set and a jump to a chain of that rule.
func FuzzDecide(f *testing.F) {
	f.Add(natrules.Join(natrules.TCP(), natrules.Dport(80)), []byte{0, 80}, false)
	f.Add(natrules.Join(natrules.TCP(), natrules.Payload(2, 0, 4, 1), natrules.Lookup("v", 1, 0)), []byte{0, 80}, true)
	f.Add(natrules.Expr("match", nft.AppendAttr(nil, 1, []byte("tcp\x00")), natrules.Num(2, 0), nft.AppendAttr(nil, 3, make([]byte, 16))), []byte{}, true)
	table := nft.TableID{Family: nft.FamilyInet, Name: "t"}
	f.Fuzz(func(_ *testing.T, raw, key []byte, v6 bool) {
		exprs, err := nft.ParseExprs(raw)
		if err != nil {
			return
		}
		jump := []any{nft.Immediate{Verdict: &nft.Verdict{Code: -3, Chain: "c"}}}
		rs := &ruleset{
			chains: []*chain{
				{id: nft.ChainID{Table: table, Name: "in"}, hook: &nft.Hook{Num: hookInput, Type: "filter"}, rules: [][]any{exprs, jump, exprs}},
				{id: nft.ChainID{Table: table, Name: "c"}, rules: [][]any{exprs, jump}},
			},
			sets: map[setID]*nft.Set{{table, "v"}: {Name: "v", Flags: nft.SetMap, KeyLen: 2, Elements: map[string]nft.Element{"": {Key: key}}}},
		}
		_, _ = rs.decide(port.Slot{Protocol: port.TCP, Port: 80}, v6)
	})
}
