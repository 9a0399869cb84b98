// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/source/nat/region"
)

// Host is what the compiler needs to know of the machine.
type Host struct {
	Links    map[uint32]string // interface names by index
	Local    []netip.Prefix    // routes of type local
	Nodes    []netip.Addr      // own addresses but the loopback, the default route's first
	Outer    int               // how many of Nodes are on an interface that carries a default route
	Uplinks  []string          // interfaces that carry a default route
	Loopback []string
	// Redirect is the own address of IPv4 and of IPv6 that REDIRECT sends to what
	// comes in over the default route's interface; zero if not known.
	Redirect [2]netip.Addr
}

// machine is a host with sets that are asked for often.
type machine struct {
	Host
	loopbacks region.Set[string] // the loopback interfaces
	sources   [2]region.Set[netip.Addr]
	nodes     [2][]netip.Addr
	outer     [2][]netip.Addr
}

func (h *Host) equal(o *Host) bool {
	return maps.Equal(h.Links, o.Links) && slices.Equal(h.Local, o.Local) && slices.Equal(h.Nodes, o.Nodes) && h.Outer == o.Outer &&
		slices.Equal(h.Uplinks, o.Uplinks) && slices.Equal(h.Loopback, o.Loopback) && h.Redirect == o.Redirect
}

func newMachine(host Host) machine {
	h := machine{Host: host}
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
			if j < h.Outer {
				h.outer[i] = append(h.outer[i], a)
			}
		}
		if len(h.outer[i]) == 0 {
			h.outer[i] = h.nodes[i]
		}
		if len(h.nodes[i]) > 0 {
			h.sources[i] = region.Addrs(v6).None()
		}
		for _, a := range h.nodes[i] {
			h.sources[i] = region.Addrs(v6).Union(h.sources[i], region.Addrs(v6).One(a))
		}
	}
	return h
}

func familyIndex(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}
