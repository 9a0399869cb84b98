// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/source/nat/compile"
)

func TestHostOfSnapshot(t *testing.T) {
	p, a := netip.MustParsePrefix, netip.MustParseAddr
	got := hostOf(&netwatch.Snapshot{
		Addresses: []netwatch.Address{{Link: 2, Prefix: p("192.0.2.9/24")}, {Link: 2, Prefix: p("192.0.2.2/24")},
			{Link: 2, Prefix: p("fe80::1/64")}, {Link: 2, Prefix: p("2001:db8::3/64")}, {Link: 3, Prefix: p("172.17.0.1/16")}},
		Links:    []netwatch.Link{{Index: 1, Name: "lo", Flags: net.FlagLoopback}, {Index: 2, Name: "eth0"}, {Index: 3, Name: "docker0"}},
		Defaults: []netwatch.Route{{Dst: p("0.0.0.0/0"), Link: 2}, {Dst: p("::/0"), Link: 2}, {Dst: p("::/0"), Link: 9}},
		Local: []netwatch.Route{
			{Dst: p("127.0.0.0/8"), Link: 1}, {Dst: p("127.0.0.1/32"), Link: 1}, {Dst: p("172.17.0.1/32"), Link: 3},
			{Dst: p("192.0.2.2/32"), Link: 2}, {Dst: p("192.0.2.2/32"), Link: 3}, {Dst: p("fe80::1/128"), Link: 2},
		},
	})
	want := compile.Host{
		Links:     map[uint32]string{1: "lo", 2: "eth0", 3: "docker0"},
		Local:     []netip.Prefix{p("127.0.0.0/8"), p("127.0.0.1/32"), p("172.17.0.1/32"), p("192.0.2.2/32"), p("fe80::1/128")},
		Nodes:     []netip.Addr{a("192.0.2.2"), a("172.17.0.1")},
		Reachable: 1,
		Uplinks:   [2][]string{{"eth0"}, {"eth0"}},
		Loopback:  []string{"lo"},
		Primary:   map[string][2]netip.Addr{"eth0": {a("192.0.2.9"), a("2001:db8::3")}, "docker0": {a("172.17.0.1")}},
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(compile.Host{}), cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// Other machines come in by the interfaces of default routes, wherever these are; without one, by
// all that may lead to them.
func TestUplinks(t *testing.T) {
	route := func(dst string, link int) netwatch.Route {
		return netwatch.Route{Dst: netip.MustParsePrefix(dst), Link: link}
	}
	eth0, eth1, docker0 := route("192.0.2.2/32", 2), route("2001:db8::2/128", 3), route("172.17.0.1/32", 4)
	for name, c := range map[string]struct {
		s         netwatch.Snapshot
		four, six string
		reachable int
	}{
		"default route":                     {netwatch.Snapshot{Defaults: []netwatch.Route{route("0.0.0.0/0", 2), route("::/0", 3)}}, "[eth0 eth1]", "[eth0 eth1]", 2},
		"default route of one family":       {netwatch.Snapshot{Defaults: []netwatch.Route{route("0.0.0.0/0", 2)}}, "[eth0]", "[eth0 eth1]", 2},
		"halves":                            {netwatch.Snapshot{Defaults: []netwatch.Route{route("0.0.0.0/1", 2), route("128.0.0.0/1", 2)}}, "[eth0]", "[eth0 eth1]", 2},
		"another table":                     {netwatch.Snapshot{Others: []netwatch.Route{route("0.0.0.0/0", 2)}}, "[eth0]", "[eth0 eth1]", 2},
		"another table beside the main one": {netwatch.Snapshot{Defaults: []netwatch.Route{route("0.0.0.0/0", 2)}, Others: []netwatch.Route{route("0.0.0.0/0", 4)}}, "[eth0]", "[eth0 eth1]", 2},
		"no default route":                  {netwatch.Snapshot{}, "[eth0 eth1]", "[eth0 eth1]", 2},
		"no address by the default route":   {netwatch.Snapshot{Defaults: []netwatch.Route{route("0.0.0.0/0", 3)}}, "[eth1]", "[eth1]", 1},
	} {
		s := c.s
		s.Links = []netwatch.Link{{Index: 1, Name: "lo", Flags: net.FlagLoopback}, {Index: 2, Name: "eth0"}, {Index: 3, Name: "eth1"}, {Index: 4, Name: "docker0", Bridge: true}}
		s.Local = []netwatch.Route{route("127.0.0.0/8", 1), eth0, docker0, eth1}
		h := hostOf(&s)
		if four, six := fmt.Sprint(h.Uplinks[0]), fmt.Sprint(h.Uplinks[1]); four != c.four || six != c.six || h.Reachable != c.reachable {
			t.Errorf("%s: %s, %s, %d reachable", name, four, six, h.Reachable)
		}
	}
	s := netwatch.Snapshot{Links: []netwatch.Link{{Index: 1, Name: "lo", Flags: net.FlagLoopback}, {Index: 2, Name: "eth0"}, {Index: 4, Name: "br0", Bridge: true}}, Local: []netwatch.Route{docker0}}
	if got := fmt.Sprint(hostOf(&s).Uplinks[0]); got != "[eth0 br0]" {
		t.Errorf("only a bridge has an address: %s", got)
	}
}
