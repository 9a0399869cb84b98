// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
)

// narrowAddrs narrows a set of addresses by a range or its contrary.
func (s *state) narrowAddrs(to *region.Set[netip.Addr], r ruleset.AddrRange, invert bool) {
	in := region.Addrs(s.v6).Range(r.First, r.Last)
	if invert {
		in = in.Complement()
	}
	*to = region.Addrs(s.v6).Intersect(*to, in)
}

// narrowPorts narrows the destination port by ranges or their contrary.
func (s *state) narrowPorts(invert bool, ranges ...ruleset.PortRange) {
	in := portsOf(ranges)
	if invert {
		in = in.Complement()
	}
	s.m.Dport = region.Ports().Intersect(s.m.Dport, in)
}

func portsOf(ranges []ruleset.PortRange) region.Set[uint16] {
	spans := make([]region.Span[uint16], 0, len(ranges))
	for _, r := range ranges {
		spans = append(spans, region.Span[uint16]{Lo: r.First, Hi: r.Last})
	}
	return region.Ports().Of(spans)
}

// narrowProto narrows the transport protocol to p or its contrary.
func (s *state) narrowProto(p uint16, invert bool) {
	bit := uint8(0)
	if p < 256 {
		bit = protocolBit(byte(p))
	}
	if invert {
		bit = ^bit
	}
	s.m.Protocols &= bit
}

// header narrows s by a legacy rule's header.
func (s *state) header(h ruleset.Header) {
	addr := func(to *region.Set[netip.Addr], a, mask []byte, invert bool) {
		r, ok := ruleset.MaskRange(a, mask)
		if !ok {
			s.blind("an address mask with holes")
			return
		}
		s.narrowAddrs(to, r, invert)
	}
	addr(&s.m.Saddr, h.Src, h.SrcMask, h.Invert&ruleset.InvSrc != 0)
	addr(&s.m.Daddr, h.Dst, h.DstMask, h.Invert&ruleset.InvDst != 0)
	if h.In != "" {
		s.m.In = region.Names().Intersect(s.m.In, interfaces(h.Invert&ruleset.InvIn != 0, h.In))
	}
	if h.Out != "" {
		s.m.Out = region.Names().Intersect(s.m.Out, interfaces(h.Invert&ruleset.InvOut != 0, h.Out))
	}
	if h.Proto != 0 {
		s.narrowProto(h.Proto, h.Invert&ruleset.InvProto != 0)
	}
}

// match narrows s by a match of x_tables.
func (s *state) match(e ruleset.Match) {
	decoded, err := e.Decode(s.v6)
	if err != nil {
		s.blind(err.Error())
		return
	}
	switch m := decoded.(type) {
	case ruleset.PortMatch:
		s.portMatch(m)
	case ruleset.MultiportMatch:
		if !m.Dst {
			s.blind("source ports")
			return
		}
		s.narrowPorts(m.Invert, m.Ports...)
	case ruleset.AddrtypeMatch:
		s.addrtype(m)
	case ruleset.ConntrackMatch:
		s.conntrack(m)
	case ruleset.StateMatch:
		s.ctState(m.States, false)
	case ruleset.MarkMatch:
		s.mark((m.Mark == 0) != m.Invert)
	case ruleset.RecentMatch:
		switch {
		case m.Uncertain:
			s.blind("match recent")
		case !m.OnlyAdds:
			s.m.maybe, s.m.clients = true, "the recent list "+m.List
		}
	case ruleset.StatisticMatch:
		s.m.maybe = true
	}
}

func (s *state) portMatch(m ruleset.PortMatch) {
	s.m.Protocols &= protocolBit(m.Proto)
	if !m.Src.All() || m.NotSrc {
		s.blind("source port")
	}
	s.narrowPorts(m.NotDst, m.Dst)
	if m.Option {
		s.blind("tcp option")
	}
	s.tcpFlags(m.FlagMask, m.FlagWant, m.NotFlags)
}

func (s *state) addrtype(m ruleset.AddrtypeMatch) {
	if m.OneLink {
		s.blind("addrtype of one interface")
	}
	ends := endsOfTypes4
	if s.v6 {
		ends = endsOfTypes6
	}
	if m.Dst != 0 {
		s.m.To &= invertEnds(ends(m.Dst), m.NotDst)
	}
	if m.Src != 0 {
		s.m.From &= invertEnds(ends(m.Src), m.NotSrc)
	}
}

// invertEnds returns ends, or the others.
func invertEnds(ends uint8, invert bool) uint8 {
	if invert {
		return (region.Local | region.Remote) &^ ends
	}
	return ends
}

// endsOfTypes4 returns which ends have an address of one of several types.
func endsOfTypes4(types uint16) (ends uint8) {
	for rtn := range uint32(16) {
		if types&(1<<rtn) != 0 {
			ends |= endsOf(rtn)
		}
	}
	return ends
}

// endsOfTypes6 is the same for IPv6, where the address must be of every type that
// is asked for, and some types are not looked at (xt_addrtype.c, match_type6).
func endsOfTypes6(types uint16) uint8 {
	asked := func(rtn ...int) bool {
		return slices.ContainsFunc(rtn, func(r int) bool { return types&(1<<r) != 0 })
	}
	switch {
	case asked(ruleset.RtnUnspec, ruleset.RtnMulticast):
		return 0
	case asked(ruleset.RtnLocal):
		return region.Local
	case asked(ruleset.RtnUnreachable, ruleset.RtnProhibit):
		return 0
	}
	return region.Local | region.Remote
}

// TCP flags of the first packet of a connection: SYN, and ECE and CWR where the
// client offers explicit congestion notification (RFC 3168).
const (
	flagSYN     = 0x02
	flagsUnsure = 0xc0
)

// tcpFlags narrows s to packets whose flags in mask are want, or are not.
func (s *state) tcpFlags(mask, want byte, invert bool) {
	switch {
	case mask == 0 && want == 0 && !invert:
	case mask&flagsUnsure != 0:
		s.blind("tcp flags")
	case (want == flagSYN&mask) == invert:
		s.m.none()
	}
}

// mark narrows s by a test of the packet mark that a mark of 0 passes or not.
func (s *state) mark(zero bool) {
	s.testsMark = true
	switch {
	case s.env.marked:
		s.blind("a packet mark, which another rule sets")
	default:
		s.m.marks, s.m.marked = true, s.m.marked || !zero
	}
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
		s.m.none()
	}
}

func (s *state) conntrack(m ruleset.ConntrackMatch) {
	if m.State.Asked {
		s.ctState(m.States, m.State.Invert)
	}
	if m.Protocol.Asked {
		s.narrowProto(uint16(m.Proto), m.Protocol.Invert)
	}
	if m.Holes {
		s.blind("an address mask with holes")
		return
	}
	if m.OrigDst.Asked {
		s.narrowAddrs(&s.m.Daddr, m.Dst, m.OrigDst.Invert)
	}
	if m.Port.Asked {
		s.narrowPorts(m.Port.Invert, m.Ports)
	}
	if m.Other {
		s.blind("match conntrack")
	}
}

// target returns how a target of x_tables ends its rule; stop is false if the
// rule goes on.
func (s *state) target(e ruleset.Target) (end branchEnd, stop bool) {
	switch e.Name {
	case "DNAT", "REDIRECT":
		n, err := e.DecodeNAT(s.v6)
		if err != nil {
			return branchEnd{kind: endNat, why: err.Error()}, true
		}
		return branchEnd{kind: endNat, nat: actionOf(n)}, true
	case "NETMAP":
		return branchEnd{kind: endNat, why: "a prefix mapping"}, true
	case "MARK", "CONNMARK", "LOG", "NFLOG", "TRACE", "CLASSIFY", "SET", "ULOG", "AUDIT", "CONNSECMARK", "SECMARK", "TEE", "IDLETIMER", "LED":
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
	return branchEnd{kind: endUnknown, why: "target " + strings.ToValidUTF8(e.Name, "?")}, true
}

// actionOf returns what the range of a target does to a destination.
func actionOf(r ruleset.NATRange) *natAction {
	n := &natAction{redirect: r.Redirect, shift: r.Shift, base: r.Base, random: r.Random}
	if r.Addrs.First.IsValid() {
		n.setAddrs(r.Addrs)
	}
	if r.SetsPort {
		n.setPorts(r.Ports.First, r.Ports.Last)
	}
	return n
}

// setAddrs makes the action send to a range of addresses, of which it keeps the
// first few.
func (n *natAction) setAddrs(r ruleset.AddrRange) {
	n.addrs = []netip.Addr{r.First}
	for a := r.First.Next(); a.IsValid() && a.Compare(r.Last) <= 0 && len(n.addrs) < rangeAddrs; a = a.Next() {
		n.addrs = append(n.addrs, a)
	}
	n.addrs = slices.Clip(n.addrs)
}

func (n *natAction) setPorts(lo, hi uint16) {
	n.ports, n.setsPorts = ruleset.PortRange{First: lo, Last: max(lo, hi)}, true
}
