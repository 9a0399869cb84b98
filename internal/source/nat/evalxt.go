// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"
	"slices"
	"strings"
)

// narrowAddrs narrows a set of addresses by a range or its contrary.
func (s *state) narrowAddrs(to *set[netip.Addr], r addrRange, invert bool) {
	o := addrOrderOf(s.v6)
	in := o.normal([]span[netip.Addr]{{r.first, r.last}})
	if invert {
		in = o.complement(in)
	}
	*to = o.intersect(*to, in)
}

// narrowPorts narrows the destination port by ranges or their contrary.
func (s *state) narrowPorts(invert bool, ranges ...portRange) {
	in := portsOf(ranges)
	if invert {
		in = portOrder.complement(in)
	}
	s.m.dport = portOrder.intersect(s.m.dport, in)
}

func portsOf(ranges []portRange) set[uint16] {
	spans := make([]span[uint16], 0, len(ranges))
	for _, r := range ranges {
		spans = append(spans, span[uint16]{r.first, r.last})
	}
	return portOrder.normal(spans)
}

// narrowProto narrows the transport protocol to p or its contrary.
func (s *state) narrowProto(p uint16, invert bool) {
	bit := uint8(0)
	if p < 256 {
		bit = protoBit(byte(p))
	}
	if invert {
		bit = bitsBoth &^ bit
	}
	s.m.proto &= bit
}

// header narrows s by a legacy rule's header.
func (s *state) header(h exprHeader) {
	addr := func(to *set[netip.Addr], a, mask []byte, invert bool) {
		r, ok := maskRange(a, mask)
		if !ok {
			s.blind("an address mask with holes")
			return
		}
		s.narrowAddrs(to, r, invert)
	}
	addr(&s.m.saddr, h.src, h.smask, h.invert&invSrc != 0)
	addr(&s.m.daddr, h.dst, h.dmask, h.invert&invDst != 0)
	if h.iif != "" {
		s.m.iif = s.m.iif.intersect(ifaceIn(h.invert&invIn != 0, h.iif))
	}
	if h.oif != "" {
		s.m.oif = s.m.oif.intersect(ifaceIn(h.invert&invOut != 0, h.oif))
	}
	if h.proto != 0 {
		s.narrowProto(h.proto, h.invert&invProto != 0)
	}
}

// match narrows s by a match of x_tables.
func (s *state) match(e exprMatch) {
	decoded, err := e.decode(s.v6)
	if err != nil {
		s.blind(err.Error())
		return
	}
	switch m := decoded.(type) {
	case portMatch:
		s.portMatch(m)
	case multiportMatch:
		if !m.dst {
			s.blind("source ports")
			return
		}
		s.narrowPorts(m.invert, m.ports...)
	case addrtypeMatch:
		s.addrtype(m)
	case conntrackMatch:
		s.conntrack(m)
	case stateMatch:
		s.ctState(m.states, false)
	case markMatch:
		if (m.mark == 0) == m.invert {
			s.m.marked = true
		}
	case recentMatch:
		switch {
		case m.uncertain:
			s.blind("match recent")
		case !m.onlyAdds:
			s.m.maybe, s.m.clients = true, "the recent list "+m.list
		}
	case statisticMatch:
		s.m.maybe = true
	}
}

func (s *state) portMatch(m portMatch) {
	s.m.proto &= protoBit(m.proto)
	if !m.src.all() || m.notSrc {
		s.blind("source port")
	}
	s.narrowPorts(m.notDst, m.dst)
	if m.option {
		s.blind("tcp option")
	}
	// A new connection's first packet has SYN of FIN,SYN,RST,ACK.
	const syn, known = 0x02, 0x17
	if m.flagMask != 0 && (m.flagWant != syn&m.flagMask || m.flagMask&^known != 0) != m.notFlags {
		s.blind("tcp flags")
	}
}

func (s *state) addrtype(m addrtypeMatch) {
	const local = 1 << rtnLocal
	if m.oneLink {
		s.blind("addrtype of one interface")
	}
	if m.dst != 0 && (m.dst&local != 0) == m.notDst {
		s.m.proto = 0
	}
	switch {
	case m.src == 0:
	case m.src == local:
		s.source(!m.notSrc)
	case m.src&local == 0 && m.notSrc:
	case m.src&local != 0 && m.notSrc:
		s.source(false)
	default:
		s.blind("source address type")
	}
}

// source narrows s to sources on this machine, or to others.
func (s *state) source(local bool) {
	want := uint8(srcRemote)
	if local {
		want = srcLocal
	}
	if s.m.src != srcAny && s.m.src != want {
		s.m.proto = 0
	}
	s.m.src = want
}

// States of a connection as xt_conntrack and ct state have them; nat chains see
// only the first packet of one.
const (
	ctRelated = 1 << 2
	ctNew     = 1 << 3
)

// ctState narrows s to connections whose state is in mask (or not, if neg).
func (s *state) ctState(mask uint32, neg bool) {
	hasNew, hasRelated := mask&ctNew != 0 != neg, mask&ctRelated != 0 != neg
	switch {
	case hasNew:
	case hasRelated:
		s.m.marked = true
	default:
		s.m.proto = 0
	}
}

func (s *state) conntrack(m conntrackMatch) {
	if m.state.asked {
		s.ctState(m.states, m.state.invert)
	}
	if m.protocol.asked {
		s.narrowProto(uint16(m.proto), m.protocol.invert)
	}
	if m.holes {
		s.blind("an address mask with holes")
		return
	}
	if m.origDst.asked {
		s.narrowAddrs(&s.m.daddr, m.dst, m.origDst.invert)
	}
	if m.port.asked {
		s.narrowPorts(m.port.invert, m.ports)
	}
	if m.other {
		s.blind("match conntrack")
	}
}

// target returns how a target of x_tables ends its rule; stop is false if the
// rule goes on.
func (s *state) target(e exprTarget) (end branchEnd, stop bool) {
	switch e.name {
	case "DNAT", "REDIRECT":
		n, err := e.decodeNAT(s.v6)
		if err != nil {
			return branchEnd{kind: endNat, why: err.Error()}, true
		}
		return branchEnd{kind: endNat, nat: actionOf(n)}, true
	case "LOG", "MARK", "CONNMARK", "NFLOG", "TRACE", "CLASSIFY", "SET", "ULOG", "AUDIT", "CONNSECMARK", "SECMARK":
		return branchEnd{}, false
	case "MASQUERADE", "SNAT":
		return branchEnd{}, false // of POSTROUTING; the packet's destination stays
	case "ACCEPT":
		return branchEnd{kind: endAccept}, true
	case "DROP":
		return branchEnd{kind: endDrop}, true
	case "RETURN":
		return branchEnd{kind: endReturn}, true
	}
	return branchEnd{kind: endUnknown, why: "target " + strings.ToValidUTF8(e.name, "?")}, true
}

// actionOf returns what the range of a target does to a destination.
func actionOf(r natRange) *natAction {
	n := &natAction{redirect: r.redirect, shift: r.shift, base: r.base}
	if r.addrs.first.IsValid() {
		n.setAddrs(r.addrs)
	}
	if r.setsPort {
		n.setPorts(r.ports.first, r.ports.last)
	}
	return n
}

// setAddrs makes the action send to a range of addresses, of which it keeps the
// first few.
func (n *natAction) setAddrs(r addrRange) {
	n.addrs = []netip.Addr{r.first}
	for a := r.first.Next(); a.IsValid() && a.Compare(r.last) <= 0 && len(n.addrs) < rangeAddrs; a = a.Next() {
		n.addrs = append(n.addrs, a)
	}
	n.addrs = slices.Clip(n.addrs)
}

func (n *natAction) setPorts(lo, hi uint16) {
	n.ports, n.setsPorts = span[uint16]{lo, max(lo, hi)}, true
}
