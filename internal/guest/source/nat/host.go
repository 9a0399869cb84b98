// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"cmp"
	"net"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/source/nat/compile"
)

// hostOf takes from a snapshot what the compiler needs to know of the machine.
func hostOf(s *netwatch.Snapshot) compile.Host {
	h := compile.Host{Links: make(map[uint32]string, len(s.Links))}
	for _, l := range s.Links {
		h.Links[uint32(l.Index)] = l.Name
		if l.Flags&net.FlagLoopback != 0 {
			h.Loopback = append(h.Loopback, l.Name)
		}
	}
	slices.Sort(h.Loopback)
	h.Uplinks = [2][]string{uplinks(s, false), uplinks(s, true)}
	type node struct {
		rank int
		addr netip.Addr
	}
	var nodes []node
	for _, r := range s.Local {
		h.Local = append(h.Local, r.Dst)
		a := r.Dst.Addr()
		if !r.Dst.IsSingleIP() || a.IsLoopback() || a.IsLinkLocalUnicast() {
			continue
		}
		n := node{1, a}
		if l, ok := s.Link(r.Link); ok && slices.Contains(h.UplinksOf(a.Is6()), l.Name) {
			n.rank = 0
		}
		nodes = append(nodes, n)
	}
	h.Primary = primary(s)
	h.Local = slices.Compact(h.Local)
	slices.SortFunc(nodes, func(a, b node) int { return cmp.Or(a.rank-b.rank, a.addr.Compare(b.addr)) })
	for _, n := range nodes {
		if slices.Contains(h.Nodes, n.addr) {
			continue
		}
		h.Nodes = append(h.Nodes, n.addr)
		if n.rank == 0 {
			h.Reachable = len(h.Nodes)
		}
	}
	return h
}

// uplinks returns the interfaces by which other machines come in, in a family: those with a default
// route, in the main table or else in one that rules choose. If the family has neither a
// route nor an address there, all but the loopback and bridges, which lead to containers.
func uplinks(s *netwatch.Snapshot, v6 bool) (names []string) {
	used := make(map[int]bool) // links by which the family has a default route or an own address
	for _, r := range slices.Concat(s.Defaults, s.Others, s.Local) {
		if a := r.Dst.Addr(); a.Is6() == v6 && !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			used[r.Link] = true
		}
	}
	through := func(routes []netwatch.Route) func(netwatch.Link) bool {
		return func(l netwatch.Link) bool {
			return slices.ContainsFunc(routes, func(r netwatch.Route) bool { return r.Link == l.Index })
		}
	}
	external := func(l netwatch.Link) bool { return l.Flags&net.FlagLoopback == 0 }
	for _, leads := range []func(netwatch.Link) bool{
		through(s.Defaults), through(s.Others), func(l netwatch.Link) bool { return external(l) && !l.Bridge }, external,
	} {
		names = nil
		found := false
		for _, l := range s.Links {
			if leads(l) {
				names, found = append(names, l.Name), found || used[l.Index]
			}
		}
		if found {
			break
		}
	}
	return names
}

// primary returns the first address of IPv4 and of IPv6 of each link.
func primary(s *netwatch.Snapshot) map[string][2]netip.Addr {
	out := make(map[string][2]netip.Addr)
	for _, address := range s.Addresses {
		a := address.Prefix.Addr()
		l, ok := s.Link(address.Link)
		if !ok || a.IsLinkLocalUnicast() || a.IsLoopback() {
			continue
		}
		i := 0
		if a.Is6() {
			i = 1
		}
		if first := out[l.Name]; !first[i].IsValid() {
			first[i] = a
			out[l.Name] = first
		}
	}
	return out
}
