// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// Transport protocols as bits of match.proto.
const (
	bitTCP   = 1
	bitUDP   = 2
	bitsBoth = bitTCP | bitUDP
)

func protoBit(p byte) uint8 {
	switch p {
	case byte(port.TCP):
		return bitTCP
	case byte(port.UDP):
		return bitUDP
	}
	return 0
}

// Where a source address may be.
const (
	srcAny = iota
	srcLocal
	srcRemote
)

// match is the conjunction of what a packet must be. Only packets to an address
// of this machine are of interest, so "the destination is local" is no condition.
type match struct {
	proto        uint8
	dport        set[uint16]
	daddr, saddr set[netip.Addr]
	src          uint8
	iif, oif     ifaces
	opaque       []string // conditions that are not understood
	marked       bool     // needs a packet mark, or a relation to another connection, that a plain new one has not
	maybe        bool     // balanced: only some of these packets
	clients      string   // only sources that a changing set holds
}

func everything() match { return match{proto: bitsBoth} }

func (m *match) dead() bool {
	return m.proto == 0 || m.dport.empty() || m.daddr.empty() || m.saddr.empty() || m.iif.empty() || m.oif.empty()
}

// and narrows m to what b matches too.
func (m match) and(b match, v6 bool) match {
	o := addrOrderOf(v6)
	out := match{
		proto:   m.proto & b.proto,
		dport:   portOrder.intersect(m.dport, b.dport),
		daddr:   o.intersect(m.daddr, b.daddr),
		saddr:   o.intersect(m.saddr, b.saddr),
		src:     m.src,
		iif:     m.iif.intersect(b.iif),
		oif:     m.oif.intersect(b.oif),
		opaque:  m.opaque,
		marked:  m.marked || b.marked,
		maybe:   m.maybe || b.maybe,
		clients: cmp.Or(m.clients, b.clients),
	}
	if len(b.opaque) > 0 {
		out.opaque = append(slices.Clone(m.opaque), b.opaque...)
	}
	switch {
	case m.src == srcAny:
		out.src = b.src
	case b.src != srcAny && m.src != b.src:
		out.proto = 0
	}
	return out
}

// overlaps reports whether some packet may match both.
func (m *match) overlaps(b *match, v6 bool) bool {
	both := m.and(*b, v6)
	return !both.dead()
}

// minus removes from b what m matches. It is exact if m is narrower than b in one
// respect. Otherwise it removes nothing, because some packets remain for each.
func (m *match) minus(b *match, v6 bool) match {
	o := addrOrderOf(v6)
	rest := *b
	if len(m.opaque) > 0 || m.maybe || m.marked || m.proto&b.proto != b.proto || !portOrder.covers(m.dport, b.dport) {
		return rest
	}
	narrower := 0
	var cut func()
	if !o.covers(m.daddr, b.daddr) {
		narrower++
		cut = func() { rest.daddr = o.subtract(b.daddr, m.daddr) }
	}
	if !o.covers(m.saddr, b.saddr) {
		narrower++
		cut = func() { rest.saddr = o.subtract(b.saddr, m.saddr) }
	}
	if m.src != srcAny && m.src != b.src {
		narrower++
		cut = func() { rest.src = srcLocal + srcRemote - m.src }
	}
	if !m.iif.covers(b.iif) {
		narrower++
		cut = func() { rest.iif = b.iif.intersect(m.iif.invert()) }
	}
	if !m.oif.covers(b.oif) {
		narrower++
		cut = func() { rest.oif = b.oif.intersect(m.oif.invert()) }
	}
	switch narrower {
	case 0:
		rest.proto = 0
	case 1:
		cut()
	}
	return rest
}

// local reports whether a connection that this machine makes from addr to itself matches.
func (m *match) local(addr netip.Addr, v6 bool) bool {
	o := addrOrderOf(v6)
	return m.src != srcRemote && o.contains(m.daddr, addr) && o.contains(m.saddr, addr) &&
		m.iif.contains("") && m.oif.contains("lo")
}

// natAction is what a DNAT or REDIRECT makes of a packet's destination.
type natAction struct {
	redirect  bool
	addrs     []netip.Addr // empty: the address stays
	ports     span[uint16] // zero: the port stays
	base      uint16       // with shift: the port that becomes ports.lo
	shift     bool
	setsPorts bool
}

const rangeAddrs = 4 // of a range of addresses, as many are tried

// targets returns where a connection to addr:p ends up, best guess first.
func (n *natAction) targets(addr netip.Addr, p uint16) []netip.AddrPort {
	to := p
	switch {
	case !n.setsPorts:
	case n.shift:
		to = n.ports.lo + (p - n.base)
		if to < n.ports.lo || to > n.ports.hi {
			to = n.ports.lo
		}
	case p < n.ports.lo || p > n.ports.hi:
		to = n.ports.lo
	}
	var out []netip.AddrPort
	switch {
	case n.redirect:
		out = append(out, netip.AddrPortFrom(port.Loopback(addr), to))
	case len(n.addrs) == 0:
		if addr.IsUnspecified() {
			addr = port.Loopback(addr)
		}
		out = append(out, netip.AddrPortFrom(addr, to))
	}
	for _, a := range n.addrs {
		out = append(out, netip.AddrPortFrom(a, to))
	}
	return out
}
