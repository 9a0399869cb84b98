// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"maps"
	"net/netip"
	"slices"
)

// Host is what the compiler needs to know of the machine.
type Host struct {
	Links    map[uint32]string // interface names by index
	Local    []netip.Prefix    // routes of type local
	Nodes    []netip.Addr      // own addresses that others can reach, the default route's first
	Uplinks  []string          // interfaces that carry a default route
	Loopback []string
}

func (h *Host) equal(o *Host) bool {
	return maps.Equal(h.Links, o.Links) && slices.Equal(h.Local, o.Local) && slices.Equal(h.Nodes, o.Nodes) &&
		slices.Equal(h.Uplinks, o.Uplinks) && slices.Equal(h.Loopback, o.Loopback)
}
