// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
)

// Host is what the compiler needs to know of the machine.
type Host struct {
	Links     map[uint32]string // interface names by index
	Local     []netip.Prefix    // routes of type local
	Nodes     []netip.Addr      // own addresses but the loopback, those of uplinks first
	Reachable int               // how many of Nodes, counted from the first, are on an uplink
	Uplinks   [2][]string       // of IPv4 and of IPv6: interfaces by which other machines come in
	Loopback  []string
	// Primary has, by interface, the own address of IPv4 and of IPv6 that REDIRECT
	// sends to what comes in over it.
	Primary map[string][2]netip.Addr
}

// machine is a host with sets that are asked for often.
type machine struct {
	Host
	loopbacks region.Set[string] // the loopback interfaces
	// By family: all own addresses, and those that connections of this machine come from.
	local, sources [2]region.Set[netip.Addr]
	nodes          [2][]netip.Addr
	reachable      [2][]netip.Addr           // nodes that other machines reach
	reachableSet   [2]region.Set[netip.Addr] // the same
	node           map[netip.Addr]struct{}   // of both families
}

func (h *Host) equal(o *Host) bool {
	return maps.Equal(h.Links, o.Links) && slices.Equal(h.Local, o.Local) && slices.Equal(h.Nodes, o.Nodes) && h.Reachable == o.Reachable &&
		slices.EqualFunc(h.Uplinks[:], o.Uplinks[:], slices.Equal[[]string]) && slices.Equal(h.Loopback, o.Loopback) && maps.Equal(h.Primary, o.Primary)
}

// UplinksOf returns the uplinks of a family.
func (h *Host) UplinksOf(v6 bool) []string { return h.Uplinks[familyIndex(v6)] }

func newMachine(host Host) machine {
	h := machine{Host: host, node: make(map[netip.Addr]struct{}, len(host.Nodes))}
	for _, a := range h.Nodes {
		h.node[a] = struct{}{}
	}
	names := h.Loopback
	if len(names) == 0 {
		names = []string{"lo"}
	}
	h.loopbacks = region.Named(names...)
	for i, v6 := range []bool{false, true} {
		for j, a := range h.Nodes {
			if a.Is4() == v6 {
				continue
			}
			h.nodes[i] = append(h.nodes[i], a)
			if j < h.Reachable {
				h.reachable[i] = append(h.reachable[i], a)
			}
		}
		if len(h.reachable[i]) == 0 {
			h.reachable[i] = h.nodes[i]
		}
		var local, reachableSet []region.Span[netip.Addr]
		for _, p := range h.Local {
			if p.Addr().Is4() != v6 {
				local = append(local, region.PrefixSpan(p))
			}
		}
		for _, a := range h.reachable[i] {
			reachableSet = append(reachableSet, region.Span[netip.Addr]{Lo: a, Hi: a})
		}
		h.local[i], h.reachableSet[i] = region.Addrs(v6).Of(local), region.Addrs(v6).Of(reachableSet)
		h.sources[i] = sources(h.local[i], v6)
	}
	return h
}

// sources returns the addresses that connections of this machine come from, or all
// addresses if that is not known. Of IPv6 a link-local one is chosen only for another
// of these (RFC 6724, section 5, rule 2), and none of them is published.
func sources(local region.Set[netip.Addr], v6 bool) region.Set[netip.Addr] {
	addrs := region.Addrs(v6)
	s := addrs.Subtract(local, loopbackAddrs(v6))
	if v6 {
		s = addrs.Subtract(s, region.Prefix(netip.MustParsePrefix("fe80::/10")))
	}
	if s.Empty() {
		return region.Set[netip.Addr]{}
	}
	return s
}

func familyIndex(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}
