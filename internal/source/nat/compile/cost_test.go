// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

// Adding and removing a rule costs the same in a large ruleset.
func TestChangeCostIndependentOfSize(t *testing.T) {
	cost := func(n int) (allocs float64, evals int) {
		c := compiled(bigSnapshot(n))
		ch := c.tables[natrules.Table].chains["DOCKER"]
		raw := natrules.Join(natrules.TCP(), natrules.Dport(80), natrules.DNAT("172.17.0.9", 80))
		const rounds = 100
		before := c.evals
		allocs = testing.AllocsPerRun(rounds, func() {
			c.insertRule(ch, len(ch.rules), 99_999, raw)
			c.Commit()
			c.removeRule(ch.rules[len(ch.rules)-1])
			c.Commit()
		})
		return allocs, (c.evals - before) / (rounds + 1)
	}
	few, evals := cost(10)
	many, evalsMany := cost(10_000)
	if evalsMany != evals || evals > 2 {
		t.Errorf("%d rules evaluated among 10, %d among 10,000", evals, evalsMany)
	}
	if few > mostAllocs || many > few+16 {
		t.Errorf("adding and removing a rule allocates %v times among 10, %v among 10,000; want at most %d and 16 more", few, many, mostAllocs)
	}
}

const mostAllocs = 130
