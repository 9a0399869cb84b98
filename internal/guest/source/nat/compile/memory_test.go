// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/testkit/heap"
	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

// chainsSnapshot has n chains with a rule each, as kube-proxy's, and a verdict map
// that leads to them.
func chainsSnapshot(n int) *ruleset.Snapshot {
	t := &ruleset.Table{ID: natrules.Table, Chains: natrules.BaseChains()}
	m := &ruleset.Set{Name: "m", Flags: ruleset.SetMap, KeyLen: 2, DataType: ruleset.VerdictDataType, Elements: make(map[string]ruleset.Element)}
	t.Sets = []*ruleset.Set{m}
	t.Chains[0].Rules = []ruleset.Rule{{Handle: 1, Raw: natrules.Join(natrules.TCP(), natrules.Payload(2, 2, 2, 1), natrules.Lookup("m", 1, 0))}}
	for i := range n {
		name := fmt.Sprint("c", i)
		t.Chains = append(t.Chains, &ruleset.Chain{Name: name, Handle: uint64(100_000 + i), Rules: []ruleset.Rule{
			{Handle: uint64(10 + i), Raw: natrules.Join(natrules.TCP(), natrules.DNAT("10.0.0.1", 80))}}})
		e := ruleset.Element{Key: []byte{byte((i + 1) >> 8), byte(i + 1)}, Verdict: &ruleset.Verdict{Code: ruleset.VerdictGoto, Chain: name}}
		m.Elements[e.ID()] = e
	}
	return &ruleset.Snapshot{Tables: []*ruleset.Table{t}}
}

// TestMemoryAfterBurst checks that a compiler that had many rules gives their
// memory back.
func TestMemoryAfterBurst(t *testing.T) {
	const many, most = 20_000, 1 << 20
	all := func(ruleset.TableID) bool { return true }
	sync := func(snapshot func(int) *ruleset.Snapshot) func(*Compiler) {
		return func(c *Compiler) {
			for _, n := range []int{many, 10} {
				c.Sync(snapshot(n), all)
				c.Commit()
			}
		}
	}
	for name, burst := range map[string]func(*Compiler){
		"rules of one chain": sync(bigSnapshot),
		"chains and a map":   sync(chainsSnapshot),
		"rules one after another": func(c *Compiler) {
			ch := c.tables[natrules.Table].chains["DOCKER"]
			for i := range many {
				c.insertRule(ch, len(ch.rules), uint64(100_000+i), natrules.Join(natrules.TCP(), natrules.Dport(uint16(i+1)), natrules.DNAT("172.17.0.9", 80)))
			}
			c.Commit()
			for i := range many {
				c.removeRule(ch.index[uint64(100_000+i)])
				if i%100 == 99 {
					c.Commit()
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := compiled(bigSnapshot(10))
			before := heap.Used()
			burst(c)
			if grew := heap.Used() - before; grew > most {
				t.Errorf("%d KiB more than before, want at most %d", grew>>10, most>>10)
			}
		})
	}
}
