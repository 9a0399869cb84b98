// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
)

// protocolBit returns the bit of region.Box.Protocols for an IP protocol, 0 for
// one that has no ports of interest.
func protocolBit(p byte) uint8 {
	switch p {
	case byte(port.TCP):
		return region.TCP
	case byte(port.UDP):
		return region.UDP
	}
	return 0
}

// match is the conjunction of what a packet must be: a box, and conditions that a
// box cannot express. Only first packets of new connections to an address of this
// machine, or from it, are of interest, so "the destination is local" is no
// condition.
type match struct {
	region.Box
	opaque  []string // conditions that are not understood
	marked  bool     // needs a packet mark, or a relation to another connection, that a plain new one has not
	marks   bool     // tests the packet mark, which tables that are not read may set; see tableMarks
	maybe   bool     // balanced: only some of these packets
	clients string   // only sources that a changing set holds
	others  bool     // only sources that a changing set does not hold
}

func everything() match { return match{Box: region.All()} }

// and narrows m to what b matches too.
func (m match) and(b match, v6 bool) match {
	out := match{
		Box:     region.Space{V6: v6}.And(m.Box, b.Box),
		opaque:  m.opaque,
		marked:  m.marked || b.marked,
		marks:   m.marks || b.marks,
		maybe:   m.maybe || b.maybe,
		clients: cmp.Or(m.clients, b.clients),
		others:  m.others || b.others,
	}
	if len(b.opaque) > 0 {
		out.opaque = append(slices.Clone(m.opaque), b.opaque...)
	}
	return out
}

// none makes m match nothing.
func (m *match) none() { m.Protocols = 0 }

// interfaces returns the set of interfaces that a rule names, or all others.
func interfaces(invert bool, names ...string) region.Set[string] {
	s := region.Named(names...)
	if invert {
		s = s.Complement()
	}
	return s
}

// natAction is what a DNAT or REDIRECT makes of a packet's destination.
type natAction struct {
	redirect  bool
	addrs     []netip.Addr      // empty: the address stays
	ports     ruleset.PortRange // if setsPorts
	setsPorts bool
	random    bool   // any of ports
	shift     bool   // a port p becomes ports.First + (p - base)
	base      uint16 // of shift
}

// Of a range of addresses or of random ports, so many are tried.
const (
	rangeAddrs = 4
	rangePorts = 8
)

// newPorts returns what port p becomes, the likeliest first (nf_nat_core.c,
// nf_nat_l4proto_unique_tuple).
func (n *natAction) newPorts(p uint16) []uint16 {
	size := n.ports.Last - n.ports.First + 1 // 0 for all 65,536
	switch {
	case !n.setsPorts, !n.random && !n.shift && n.ports.First <= p && p <= n.ports.Last:
		return []uint16{p}
	case n.shift && size == 0:
		return []uint16{n.ports.First + (p - n.base)}
	case n.shift:
		return []uint16{n.ports.First + (p-n.base)%size}
	case !n.random:
		return []uint16{n.ports.First}
	}
	var out []uint16
	for q := int(n.ports.First); q <= int(n.ports.Last) && len(out) < rangePorts; q++ {
		out = append(out, uint16(q))
	}
	return out
}

// targets says where a connection to addr:p ends up, best guess first. here are
// the addresses that redirected connections are sent to.
func (n *natAction) targets(addr netip.Addr, p uint16, here []netip.Addr) []netip.AddrPort {
	addrs := n.addrs
	switch {
	case n.redirect:
		addrs = here
	case len(addrs) == 0 && addr.IsUnspecified():
		addrs = here
	case len(addrs) == 0:
		addrs = []netip.Addr{addr}
	}
	var out []netip.AddrPort
	for _, a := range addrs {
		for _, q := range n.newPorts(p) {
			out = append(out, netip.AddrPortFrom(a, q))
		}
	}
	return out
}
