// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Matches of x_tables in decoded form. Match.Decode returns one of these, or nil for a
// match that neither limits nor decides.
type (
	// PortMatch is "tcp" or "udp". The port ranges are 0 to 65,535 if not given.
	PortMatch struct {
		Proto              byte
		Src, Dst           PortRange
		NotSrc, NotDst     bool
		Option             bool // a TCP option must be there
		FlagMask, FlagWant byte // of TCP
		NotFlags           bool
	}
	// MultiportMatch is a list of ports.
	MultiportMatch struct {
		Dst    bool // of the destination
		Ports  []PortRange
		Invert bool
	}
	// AddrtypeMatch asks for types of addresses, as bits by RTN_*.
	AddrtypeMatch struct {
		Src, Dst       uint16
		NotSrc, NotDst bool
		OneLink        bool // the type on one interface
	}
	// ConntrackMatch asks for the state of a connection and its first destination.
	ConntrackMatch struct {
		States   uint32
		State    Condition
		Proto    byte
		Protocol Condition
		Dst      AddrRange
		Holes    bool // the mask of dst is no prefix
		OrigDst  Condition
		Ports    PortRange
		Port     Condition
		Other    bool // more is asked for
	}
	// StateMatch asks for the state of a connection.
	StateMatch struct{ States uint32 }
	// MarkMatch asks for a packet mark.
	MarkMatch struct {
		Mark   uint32
		Invert bool
	}
	// RecentMatch asks for a source that a list holds.
	RecentMatch struct {
		List      string
		OnlyAdds  bool // it asks for nothing
		Uncertain bool
	}
	// StatisticMatch passes some packets by chance.
	StatisticMatch struct{}
)

// Condition is whether something is asked for, and whether it is inverted.
type Condition struct{ Asked, Invert bool }

// PortRange is a range of ports with both ends.
type PortRange struct{ First, Last uint16 }

// All reports whether every port is in the range.
func (r PortRange) All() bool { return r == PortRange{0, 0xffff} }

func (r PortRange) String() string {
	if r.First == r.Last {
		return fmt.Sprint(r.First)
	}
	return fmt.Sprintf("%d:%d", r.First, r.Last)
}

// AddrRange is a range of addresses with both ends.
type AddrRange struct{ First, Last netip.Addr }

// String returns the shortest form: an address, a prefix or both ends.
func (r AddrRange) String() string {
	if r.First == r.Last {
		return r.First.String()
	}
	for bits := r.First.BitLen(); bits >= 0; bits-- {
		if p := netip.PrefixFrom(r.First, bits); RangeOfPrefix(p) == r {
			return p.String()
		}
	}
	return r.First.String() + "-" + r.Last.String()
}

// RangeOfPrefix returns the addresses of a prefix.
func RangeOfPrefix(p netip.Prefix) AddrRange {
	first := p.Masked().Addr()
	b := first.AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return AddrRange{first, last}
}

// MaskRange returns the addresses that addr under mask stands for; not ok if
// the mask has holes.
func MaskRange(addr, mask []byte) (r AddrRange, ok bool) {
	first, last := make([]byte, len(addr)), make([]byte, len(addr))
	ended := false
	for i := range addr {
		m := mask[i]
		inv := ^m
		if ended && m != 0 || inv&(inv+1) != 0 {
			return r, false
		}
		ended = ended || m != 0xff
		first[i], last[i] = addr[i]&m, addr[i]&m|inv
	}
	r.First, _ = netip.AddrFromSlice(first)
	r.Last, _ = netip.AddrFromSlice(last)
	return r, true
}

// info reads a match's or target's binary data.
type info []byte

func (b info) u16(off int) uint16 { return binary.NativeEndian.Uint16(b[off:]) }
func (b info) u32(off int) uint32 { return binary.NativeEndian.Uint32(b[off:]) }

func (b info) ports(off int) PortRange { return PortRange{b.u16(off), b.u16(off + 2)} }

var errTruncated = errors.New("truncated")

// Decode reads the binary data of a match. Its error names what is not understood.
func (e Match) Decode(v6 bool) (any, error) {
	var m any
	var err error
	switch {
	case e.Name == "tcp" && e.Revision == 0:
		m, err = decodeTCP(e.Info)
	case e.Name == "udp" && e.Revision == 0:
		m, err = decodeUDP(e.Info)
	case e.Name == "multiport" && e.Revision <= 1:
		m, err = decodeMultiport(e.Info, e.Revision)
	case e.Name == "addrtype" && e.Revision <= 1:
		m, err = decodeAddrtype(e.Info, e.Revision)
	case e.Name == "comment", e.Name == "nfacct":
	case e.Name == "conntrack" && e.Revision >= 1 && e.Revision <= 3:
		m, err = decodeConntrack(e.Info, e.Revision, v6)
	case e.Name == "state":
		m, err = decodeState(e.Info)
	case e.Name == "mark" && e.Revision == 1:
		m, err = decodeMark(e.Info)
	case e.Name == "recent" && e.Revision <= 1:
		m, err = decodeRecent(e.Info)
	case e.Name == "statistic":
		m = StatisticMatch{}
	default:
		err = errors.New("match " + e.Name)
	}
	if errors.Is(err, errTruncated) {
		err = fmt.Errorf("match %s: %w", e.Name, err)
	}
	return m, err
}

// decodeTCP reads struct xt_tcp.
func decodeTCP(b info) (any, error) {
	if len(b) < 12 {
		return nil, errTruncated
	}
	return PortMatch{
		Proto: 6, Src: b.ports(0), Dst: b.ports(4), Option: b[8] != 0, FlagMask: b[9], FlagWant: b[10],
		NotSrc: b[11]&1 != 0, NotDst: b[11]&2 != 0, NotFlags: b[11]&4 != 0,
	}, nil
}

// decodeUDP reads struct xt_udp.
func decodeUDP(b info) (any, error) {
	if len(b) < 9 {
		return nil, errTruncated
	}
	return PortMatch{Proto: 17, Src: b.ports(0), Dst: b.ports(4), NotSrc: b[8]&1 != 0, NotDst: b[8]&2 != 0}, nil
}

// decodeMultiport reads struct xt_multiport and xt_multiport_v1.
func decodeMultiport(b info, rev uint8) (any, error) {
	const most = 15 // XT_MULTI_PORTS
	if len(b) < 32 || rev == 1 && len(b) < 48 {
		return nil, errTruncated
	}
	m := MultiportMatch{Dst: b[0] == 1, Invert: rev == 1 && b[47] != 0}
	count := min(int(b[1]), most)
	for i := 0; i < count; i++ {
		p := b.u16(2 + 2*i)
		r := PortRange{p, p}
		if rev == 1 && b[32+i] != 0 && i+1 < count { // the next port ends a range
			i++
			r.Last = b.u16(2 + 2*i)
		}
		m.Ports = append(m.Ports, r)
	}
	return m, nil
}

// decodeAddrtype reads struct xt_addrtype_info and xt_addrtype_info_v1.
func decodeAddrtype(b info, rev uint8) (any, error) {
	if len(b) < 8 || rev == 0 && len(b) < 12 {
		return nil, errTruncated
	}
	m := AddrtypeMatch{Src: b.u16(0), Dst: b.u16(2)}
	if rev == 0 {
		m.NotSrc, m.NotDst = b.u32(4) != 0, b.u32(8) != 0
		return m, nil
	}
	flags := b.u32(4)
	m.NotSrc, m.NotDst, m.OneLink = flags&1 != 0, flags&2 != 0, flags&^3 != 0
	return m, nil
}

func decodeState(b info) (any, error) {
	if len(b) < 4 {
		return nil, errTruncated
	}
	return StateMatch{b.u32(0)}, nil
}

// decodeMark reads struct xt_mark_mtinfo1.
func decodeMark(b info) (any, error) {
	if len(b) < 9 {
		return nil, errTruncated
	}
	return MarkMatch{Mark: b.u32(0), Invert: b[8] != 0}, nil
}

// decodeRecent reads struct xt_recent_mtinfo and xt_recent_mtinfo_v1.
func decodeRecent(b info) (any, error) {
	const check, set, update = 1, 2, 4
	if len(b) < 11 {
		return nil, errTruncated
	}
	how, invert := b[8], b[9] != 0
	return RecentMatch{
		List:      strings.ToValidUTF8(CString(b[10:]), "?"),
		OnlyAdds:  how&set != 0,
		Uncertain: invert || how&(check|set|update) == 0,
	}, nil
}

// decodeConntrack reads struct xt_conntrack_mtinfo1, 2 and 3.
func decodeConntrack(b info, rev uint8, v6 bool) (any, error) {
	const (
		state   = 1 << 0
		proto   = 1 << 1
		origDst = 1 << 3
		dstPort = 1 << 9
	)
	// Four addresses with masks, times, ports and flags.
	if len(b) < 152 || rev >= 2 && len(b) < 154 {
		return nil, errTruncated
	}
	flags, invert := b.u16(146), b.u16(148)
	asked := func(bit uint16) Condition { return Condition{flags&bit != 0, invert&bit != 0} }
	m := ConntrackMatch{
		State: asked(state), States: uint32(b[150]),
		Protocol: asked(proto), Proto: byte(b.u16(136)),
		OrigDst: asked(origDst),
		Port:    asked(dstPort),
		Other:   flags&^(state|proto|origDst|dstPort) != 0,
	}
	if rev >= 2 {
		m.States = uint32(b.u16(150))
	}
	n := 4
	if v6 {
		n = 16
	}
	if m.OrigDst.Asked {
		var ok bool
		m.Dst, ok = MaskRange(b[32:32+n], b[48:48+n])
		m.Holes = !ok
	}
	if m.Port.Asked {
		p := binary.BigEndian.Uint16(b[140:])
		m.Ports = PortRange{p, p}
		if rev == 3 {
			if len(b) < 162 {
				return nil, errTruncated
			}
			m.Ports = PortRange{b.u16(140), b.u16(156)}
		}
	}
	return m, nil
}

// NATRange is where a DNAT or REDIRECT target sends packets.
type NATRange struct {
	Redirect bool
	Addrs    AddrRange // not valid: the address stays
	SetsPort bool
	Ports    PortRange
	Random   bool   // any of Ports
	Shift    bool   // a port p becomes Ports.First + p - Base, round the range
	Base     uint16 // of shift
}

// DecodeNAT reads the range of a DNAT or REDIRECT target. Its error names what is
// not understood.
func (e Target) DecodeNAT(v6 bool) (NATRange, error) {
	n := NATRange{Redirect: e.Name == "REDIRECT"}
	b := info(e.Info)
	var flags uint32
	var first, last, ports info
	switch {
	case !v6 && e.Revision == 0: // struct nf_nat_ipv4_multi_range_compat
		if len(b) < 20 || b.u32(0) != 1 {
			return n, errors.New("a range of several parts")
		}
		flags, first, last, ports = b.u32(4), b[8:12], b[12:16], b[16:20]
	case e.Revision <= 2: // struct nf_nat_range, nf_nat_range2
		if len(b) < 40 || e.Revision == 2 && len(b) < 42 {
			return n, errors.New("a short range")
		}
		flags, first, last, ports = b.u32(0), b[4:20], b[20:36], b[36:40]
		if !v6 {
			first, last = first[:4], last[:4]
		}
	default:
		return n, fmt.Errorf("revision %d of target %s", e.Revision, e.Name)
	}
	if flags&NATNetmap != 0 {
		return n, errors.New("a prefix mapping")
	}
	if flags&natMapIPs != 0 && !n.Redirect {
		n.Addrs.First, _ = netip.AddrFromSlice(first)
		n.Addrs.Last, _ = netip.AddrFromSlice(last)
	}
	if flags&natProtoSet != 0 {
		n.SetsPort = true
		n.Ports = PortRange{binary.BigEndian.Uint16(ports), binary.BigEndian.Uint16(ports[2:])}
		n.Random = flags&NATRandom != 0
	}
	if n.Shift = n.SetsPort && flags&natProtoShift != 0; n.Shift {
		if e.Revision != 2 {
			return n, errors.New("a shifted range in an old revision")
		}
		n.Base = binary.BigEndian.Uint16(b[40:])
	}
	return n, nil
}
