// SPDX-License-Identifier: Apache-2.0

package nat

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

// and narrows a to what b matches too.
func (a match) and(b match, v6 bool) match {
	o := addrOrderOf(v6)
	m := match{
		proto:   a.proto & b.proto,
		dport:   portOrder.intersect(a.dport, b.dport),
		daddr:   o.intersect(a.daddr, b.daddr),
		saddr:   o.intersect(a.saddr, b.saddr),
		src:     a.src,
		iif:     a.iif.intersect(b.iif),
		oif:     a.oif.intersect(b.oif),
		opaque:  a.opaque,
		marked:  a.marked || b.marked,
		maybe:   a.maybe || b.maybe,
		clients: cmp.Or(a.clients, b.clients),
	}
	if len(b.opaque) > 0 {
		m.opaque = append(slices.Clone(a.opaque), b.opaque...)
	}
	switch {
	case a.src == srcAny:
		m.src = b.src
	case b.src != srcAny && a.src != b.src:
		m.proto = 0
	}
	return m
}

// overlaps reports whether some packet may match both.
func (a *match) overlaps(b *match, v6 bool) bool {
	m := a.and(*b, v6)
	return !m.dead()
}

// minus takes from b what a matches. It is exact when a is narrower than b in
// one respect only; else it takes nothing, because some packets remain for each.
func (a *match) minus(b *match, v6 bool) match {
	o := addrOrderOf(v6)
	m := *b
	if len(a.opaque) > 0 || a.maybe || a.marked || a.proto&b.proto != b.proto || !portOrder.covers(a.dport, b.dport) {
		return m
	}
	narrower := 0
	var cut func()
	if !o.covers(a.daddr, b.daddr) {
		narrower++
		cut = func() { m.daddr = o.subtract(b.daddr, a.daddr) }
	}
	if !o.covers(a.saddr, b.saddr) {
		narrower++
		cut = func() { m.saddr = o.subtract(b.saddr, a.saddr) }
	}
	if a.src != srcAny && a.src != b.src {
		narrower++
		cut = func() { m.src = srcLocal + srcRemote - a.src }
	}
	if !a.iif.covers(b.iif) {
		narrower++
		cut = func() { m.iif = b.iif.intersect(a.iif.invert()) }
	}
	if !a.oif.covers(b.oif) {
		narrower++
		cut = func() { m.oif = b.oif.intersect(a.oif.invert()) }
	}
	switch narrower {
	case 0:
		m.proto = 0
	case 1:
		cut()
	}
	return m
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
	more      bool         // a range holds more addresses than are listed
	ports     span[uint16] // zero: the port stays
	base      uint16       // with shift: the port that becomes ports.lo
	shift     bool
	setsPorts bool
}

const rangeAddrs = 4 // of a range of addresses, as many are tried

// targets says where a connection to addr:p ends up, best guess first.
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
