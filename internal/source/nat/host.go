// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"cmp"
	"net"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/netwatch"
)

// hostOf takes from a snapshot what the compiler needs to know of the machine.
func hostOf(s *netwatch.Snapshot) host {
	h := host{links: make(map[uint32]string, len(s.Links))}
	for _, l := range s.Links {
		h.links[uint32(l.Index)] = l.Name
		if l.Flags&net.FlagLoopback != 0 {
			h.loopback = append(h.loopback, l.Name)
		}
	}
	slices.Sort(h.loopback)
	for _, r := range s.Defaults {
		if l, ok := s.Link(r.Link); ok && !slices.Contains(h.uplinks, l.Name) {
			h.uplinks = append(h.uplinks, l.Name)
		}
	}
	type node struct {
		rank int
		addr netip.Addr
	}
	var nodes []node
	for _, r := range s.Local {
		h.local = append(h.local, r.Dst)
		a := r.Dst.Addr()
		if !r.Dst.IsSingleIP() || a.IsLoopback() || a.IsLinkLocalUnicast() {
			continue
		}
		n := node{1, a}
		if l, ok := s.Link(r.Link); ok && slices.Contains(h.uplinks, l.Name) {
			n.rank = 0
		}
		nodes = append(nodes, n)
	}
	h.local = slices.Compact(h.local)
	slices.SortFunc(nodes, func(a, b node) int { return cmp.Or(a.rank-b.rank, a.addr.Compare(b.addr)) })
	for _, n := range nodes {
		if !slices.Contains(h.nodes, n.addr) {
			h.nodes = append(h.nodes, n.addr)
		}
	}
	return h
}
