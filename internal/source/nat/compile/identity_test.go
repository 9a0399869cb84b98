// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"testing"
)

// Drafts lead to the same servers if their targets are the same; those with targets on
// own addresses only if they are of the same rule.
func TestLeadsTo(t *testing.T) {
	c := &Compiler{host: newMachine(Host{Nodes: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")}})}
	draftOf := func(raw string, targets ...string) *draft {
		d := &draft{first: &entry{rule: &rule{raw: []byte(raw), chain: &chain{table: &table{}}}}}
		for _, s := range targets {
			d.targets = append(d.targets, netip.MustParseAddrPort(s))
		}
		return d
	}
	truncated := draftOf("a", "10.9.0.1:80")
	truncated.more = true
	if c.leadsTo(truncated) != 0 || c.leadsTo(draftOf("a")) != 0 {
		t.Error("a rule whose targets are not known is the same as another")
	}
	ranged := func(raw string) *draft {
		d := draftOf(raw, "10.9.0.1:80", "10.9.0.1:81")
		d.ranged = true
		return d
	}
	for name, tt := range map[string]struct {
		a, b *draft
		same bool
	}{
		"two rules to one server":          {draftOf("a", "10.9.0.1:80"), draftOf("b", "10.9.0.1:80"), true},
		"another order":                    {draftOf("a", "10.9.0.1:80", "10.9.0.2:80"), draftOf("b", "10.9.0.2:80", "10.9.0.1:80"), true},
		"two rules to ranges":              {ranged("a"), ranged("b"), false},
		"one rule to a range":              {ranged("a"), ranged("a"), true},
		"another server":                   {draftOf("a", "10.9.0.1:80"), draftOf("a", "10.9.0.2:80"), false},
		"one more server":                  {draftOf("a", "10.9.0.1:80"), draftOf("a", "10.9.0.1:80", "10.9.0.2:80"), false},
		"two rules to two own addresses":   {draftOf("a", "10.0.0.1:80"), draftOf("b", "10.0.0.2:80"), false},
		"two rules to the loopback":        {draftOf("a", "127.0.0.1:80"), draftOf("b", "127.0.0.1:80"), false},
		"a redirect at two own addresses":  {draftOf("a", "10.0.0.1:80"), draftOf("a", "10.0.0.2:80"), true},
		"a redirect to another port":       {draftOf("a", "10.0.0.1:80"), draftOf("a", "10.0.0.2:81"), false},
		"an own address beside another's":  {draftOf("a", "10.0.0.1:80", "10.9.0.1:80"), draftOf("b", "10.0.0.1:80", "10.9.0.1:80"), false},
		"one rule, an address and another": {draftOf("a", "[fd00::a00:1]:80"), draftOf("a", "10.9.0.1:80"), false},
	} {
		if got := c.leadsTo(tt.a) == c.leadsTo(tt.b); got != tt.same {
			t.Errorf("%s: the same %t, want %t", name, got, tt.same)
		}
	}
}
