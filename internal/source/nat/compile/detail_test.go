// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

func TestDetailIsEqualByContent(t *testing.T) {
	of := func(n int) *detail {
		ch := compiled(bigSnapshot(n)).tables[natrules.Table].chains["DOCKER"]
		i := slices.IndexFunc(ch.acts, func(a *activation) bool { return a.parent.chain.name == "pre" })
		return ch.acts[i].outs[ch.rules[0]][0].detail()
	}
	a, b := of(1), of(1)
	if want := "ip nat pre > DOCKER: meta l4proto tcp iifname != \"docker0\" th dport 1000 dnat to 172.17.0.2:80"; a.String() != want {
		t.Errorf("got %s, want %s", a, want)
	}
	if !a.Equal(b) {
		t.Error("the same rule, loaded twice, differs")
	}
	for name, change := range map[string]func(*detail){
		"table":  func(d *detail) { d.table.Name = "mine" },
		"chain":  func(d *detail) { d.way = &way{chain: "other", from: d.way.from} },
		"way":    func(d *detail) { d.way = &way{chain: d.way.chain} },
		"longer": func(d *detail) { d.way = &way{chain: d.way.chain, from: &way{chain: "pre", from: &way{chain: "x"}}} },
		"rule":   func(d *detail) { d.raw = append([]byte{0}, d.raw...) },
	} {
		c := *b
		change(&c)
		if a.Equal(&c) || c.Equal(a) {
			t.Errorf("another %s is equal", name)
		}
	}
}
