// SPDX-License-Identifier: Apache-2.0

package netwatch

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

func ipNet(s string) *net.IPNet {
	p := netip.MustParsePrefix(s)
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// An update causes a listing only if it disagrees with the snapshot.
func TestUpdatesThatMatter(t *testing.T) {
	s := Snapshot{
		Links:     []Link{{1, "lo", net.FlagUp | net.FlagLoopback, false}, {2, "eth0", net.FlagUp, false}},
		Addresses: []Address{{2, netip.MustParsePrefix("192.0.2.2/24")}},
		Defaults:  []Route{{netip.MustParsePrefix("0.0.0.0/0"), 2}, {netip.MustParsePrefix("::/0"), 2}},
		Local:     []Route{{netip.MustParsePrefix("192.0.2.2/32"), 2}},
	}
	s.sort()
	w := New(Options{})
	w.set(s, nil)

	link := func(typ uint16, family uint8, l Link) bool {
		u := netlink.LinkUpdate{IfInfomsg: nl.IfInfomsg{IfInfomsg: unix.IfInfomsg{Family: family}},
			Link: &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: l.Index, Name: l.Name, Flags: l.Flags}}}
		u.Header.Type = typ
		return w.linkMatters(&u)
	}
	addr := func(added bool, index int, p string) bool {
		return w.addrMatters(&netlink.AddrUpdate{LinkAddress: *ipNet(p), LinkIndex: index, NewAddr: added})
	}
	route := func(typ, flags uint16, r netlink.Route) bool {
		return w.routeMatters(&netlink.RouteUpdate{Type: typ, NlFlags: flags, Route: r})
	}
	main := func(dst string, index int) netlink.Route {
		return netlink.Route{Table: unix.RT_TABLE_MAIN, Type: unix.RTN_UNICAST, Dst: ipNet(dst), LinkIndex: index}
	}
	several := main("0.0.0.0/0", 0)
	several.MultiPath = []*netlink.NexthopInfo{{LinkIndex: 2}, {LinkIndex: 3}}
	local := netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Dst: ipNet("192.0.2.3/32"), LinkIndex: 2}
	broadcast := netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_BROADCAST, Dst: ipNet("192.0.2.255/32"), LinkIndex: 2}
	other := main("0.0.0.0/0", 7)
	other.Table = 100

	for name, c := range map[string]struct{ got, want bool }{
		"link as it is":               {link(unix.RTM_NEWLINK, 0, s.Links[1]), false},
		"link renamed":                {link(unix.RTM_NEWLINK, 0, Link{2, "wan", net.FlagUp, false}), true},
		"link down":                   {link(unix.RTM_NEWLINK, 0, Link{2, "eth0", 0, false}), true},
		"link new":                    {link(unix.RTM_NEWLINK, 0, Link{3, "eth1", 0, false}), true},
		"link gone":                   {link(unix.RTM_DELLINK, 0, s.Links[1]), true},
		"link gone, unknown":          {link(unix.RTM_DELLINK, 0, Link{3, "eth1", 0, false}), false},
		"link taken from a bridge":    {link(unix.RTM_DELLINK, unix.AF_BRIDGE, s.Links[1]), false},
		"address renewed":             {addr(true, 2, "192.0.2.2/24"), false},
		"address new":                 {addr(true, 2, "192.0.2.3/24"), true},
		"address on another link":     {addr(true, 1, "192.0.2.2/24"), true},
		"address gone":                {addr(false, 2, "192.0.2.2/24"), true},
		"address gone, unknown":       {addr(false, 2, "192.0.2.3/24"), false},
		"default route renewed":       {route(unix.RTM_NEWROUTE, 0, main("::/0", 2)), false},
		"default route replaced":      {route(unix.RTM_NEWROUTE, unix.NLM_F_REPLACE, main("0.0.0.0/0", 2)), true},
		"default route, another link": {route(unix.RTM_NEWROUTE, 0, main("0.0.0.0/0", 3)), true},
		"default route, one more hop": {route(unix.RTM_NEWROUTE, 0, several), true},
		"default route gone":          {route(unix.RTM_DELROUTE, 0, main("0.0.0.0/0", 2)), true},
		"default route, other table":  {route(unix.RTM_NEWROUTE, 0, other), true},
		"half a default route":        {route(unix.RTM_NEWROUTE, 0, main("128.0.0.0/1", 2)), true},
		"a quarter of a default":      {route(unix.RTM_NEWROUTE, 0, main("192.0.0.0/2", 2)), false},
		"other route":                 {route(unix.RTM_NEWROUTE, 0, main("198.51.100.0/24", 2)), false},
		"other route gone":            {route(unix.RTM_DELROUTE, 0, main("198.51.100.0/24", 2)), false},
		"local route":                 {route(unix.RTM_NEWROUTE, 0, local), true},
		"broadcast route":             {route(unix.RTM_NEWROUTE, 0, broadcast), false},
	} {
		if c.got != c.want {
			t.Errorf("%s: matters %t, want %t", name, c.got, c.want)
		}
	}
}

func TestChangedOnlyWhenSomethingChanged(t *testing.T) {
	w := New(Options{})
	if _, err := w.Snapshot(); err == nil {
		t.Error("a snapshot before the first listing")
	}
	changed := func() bool {
		select {
		case <-w.Changed():
			return true
		default:
			return false
		}
	}
	one := Snapshot{Links: []Link{{1, "lo", 0, false}}}
	w.set(one, nil)
	if !changed() {
		t.Error("no notification of the first snapshot")
	}
	w.set(Snapshot{Links: []Link{{1, "lo", 0, false}}}, nil)
	if changed() {
		t.Error("a notification of an equal snapshot")
	}
	w.set(Snapshot{}, ErrLost)
	if s, err := w.Snapshot(); !changed() || err == nil || !s.equal(&one) {
		t.Errorf("after a failure: %+v, %v", s, err)
	}
	w.set(Snapshot{}, ErrLost)
	if changed() {
		t.Error("a notification of the same failure")
	}
	w.set(one, nil)
	if _, err := w.Snapshot(); !changed() || err != nil {
		t.Errorf("after recovery: %v", err)
	}
}
