// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/natrules"
)

// What is kept of a binding of a NAT rule is all that it has.
func TestPublishedIsWhole(t *testing.T) {
	b := port.Binding{
		Key:    port.Key{Protocol: port.UDP, Address: netip.MustParseAddr("10.0.0.1"), Port: 53},
		Origin: port.Origin{Source: port.SourceNAT, ID: "id"}, Inner: true, Maker: port.MakerDocker, Withheld: port.Because(port.Unlistened), Target: 1,
		Dial: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.2:53")}, Doubt: "d",
		Hints: port.Hints{Targets: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.3:53")}}, Detail: port.NewDetail("line"),
	}
	if got := keep([]port.Binding{b})[0].binding(b.Slot()); !reflect.DeepEqual(got, b) {
		t.Errorf("got %#v, want %#v", got, b)
	}
}

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
