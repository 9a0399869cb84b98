// SPDX-License-Identifier: Apache-2.0

package nat

import (
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
		Uplinks:   []string{"eth0"},
		Loopback:  []string{"lo"},
		Primary:   map[string][2]netip.Addr{"eth0": {a("192.0.2.9"), a("2001:db8::3")}, "docker0": {a("172.17.0.1")}},
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(compile.Host{}), cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
