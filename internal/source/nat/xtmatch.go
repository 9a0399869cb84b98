// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Matches of x_tables in decoded form. decode returns one of these, or nil for a
// match that neither limits nor decides.
type (
	// portMatch is "tcp" or "udp". The port ranges are 0 to 65,535 if not given.
	portMatch struct {
		proto              byte
		src, dst           portRange
		notSrc, notDst     bool
		option             bool // a TCP option must be there
		flagMask, flagWant byte // of TCP
		notFlags           bool
	}
	// multiportMatch is a list of ports.
	multiportMatch struct {
		dst    bool // of the destination
		ports  []portRange
		invert bool
	}
	// addrtypeMatch asks for types of addresses, as bits by RTN_*.
	addrtypeMatch struct {
		src, dst       uint16
		notSrc, notDst bool
		oneLink        bool // the type on one interface
	}
	// conntrackMatch asks for the state of a connection and its first destination.
	conntrackMatch struct {
		states   uint32
		state    condition
		proto    byte
		protocol condition
		dst      addrRange
		holes    bool // the mask of dst is no prefix
		origDst  condition
		ports    portRange
		port     condition
		other    bool // more is asked for
	}
	// stateMatch asks for the state of a connection.
	stateMatch struct{ states uint32 }
	// markMatch asks for a packet mark.
	markMatch struct {
		mark   uint32
		invert bool
	}
	// recentMatch asks for a source that a list holds.
	recentMatch struct {
		list      string
		onlyAdds  bool // it asks for nothing
		uncertain bool
	}
	// statisticMatch passes some packets by chance.
	statisticMatch struct{}
)

// condition says whether something is asked for, and whether of its contrary.
type condition struct{ asked, invert bool }

// portRange is a range of ports with both ends.
type portRange struct{ first, last uint16 }

func (r portRange) all() bool { return r == portRange{0, 0xffff} }

func (r portRange) String() string {
	if r.first == r.last {
		return fmt.Sprint(r.first)
	}
	return fmt.Sprintf("%d:%d", r.first, r.last)
}

// addrRange is a range of addresses with both ends.
type addrRange struct{ first, last netip.Addr }

// String returns the shortest form: an address, a prefix or both ends.
func (r addrRange) String() string {
	if r.first == r.last {
		return r.first.String()
	}
	for bits := r.first.BitLen(); bits >= 0; bits-- {
		if p := netip.PrefixFrom(r.first, bits); rangeOfPrefix(p) == r {
			return p.String()
		}
	}
	return r.first.String() + "-" + r.last.String()
}

// rangeOfPrefix returns the addresses of a prefix.
func rangeOfPrefix(p netip.Prefix) addrRange {
	first := p.Masked().Addr()
	b := first.AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return addrRange{first, last}
}

// maskRange returns the addresses that addr under mask stands for; not ok if
// the mask has holes.
func maskRange(addr, mask []byte) (r addrRange, ok bool) {
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
	r.first, _ = netip.AddrFromSlice(first)
	r.last, _ = netip.AddrFromSlice(last)
	return r, true
}

// info reads a match's or target's binary data.
type info []byte

func (b info) u16(off int) uint16 { return binary.NativeEndian.Uint16(b[off:]) }
func (b info) u32(off int) uint32 { return binary.NativeEndian.Uint32(b[off:]) }

func (b info) ports(off int) portRange { return portRange{b.u16(off), b.u16(off + 2)} }

var errTruncated = errors.New("truncated")

// decode reads the binary data of a match. Its error says what is not understood.
func (e exprMatch) decode(v6 bool) (any, error) {
	var m any
	var err error
	switch {
	case e.name == "tcp" && e.rev == 0:
		m, err = decodeTCP(e.info)
	case e.name == "udp" && e.rev == 0:
		m, err = decodeUDP(e.info)
	case e.name == "multiport" && e.rev <= 1:
		m, err = decodeMultiport(e.info, e.rev)
	case e.name == "addrtype" && e.rev <= 1:
		m, err = decodeAddrtype(e.info, e.rev)
	case e.name == "comment", e.name == "nfacct":
	case e.name == "conntrack" && e.rev >= 1 && e.rev <= 3:
		m, err = decodeConntrack(e.info, e.rev, v6)
	case e.name == "state":
		m, err = decodeState(e.info)
	case e.name == "mark" && e.rev == 1:
		m, err = decodeMark(e.info)
	case e.name == "recent" && e.rev <= 1:
		m, err = decodeRecent(e.info)
	case e.name == "statistic":
		m = statisticMatch{}
	default:
		err = errors.New("match " + e.name)
	}
	if errors.Is(err, errTruncated) {
		err = fmt.Errorf("match %s: %w", e.name, err)
	}
	return m, err
}

// decodeTCP reads struct xt_tcp.
func decodeTCP(b info) (any, error) {
	if len(b) < 12 {
		return nil, errTruncated
	}
	return portMatch{
		proto: 6, src: b.ports(0), dst: b.ports(4), option: b[8] != 0, flagMask: b[9], flagWant: b[10],
		notSrc: b[11]&1 != 0, notDst: b[11]&2 != 0, notFlags: b[11]&4 != 0,
	}, nil
}

// decodeUDP reads struct xt_udp.
func decodeUDP(b info) (any, error) {
	if len(b) < 9 {
		return nil, errTruncated
	}
	return portMatch{proto: 17, src: b.ports(0), dst: b.ports(4), notSrc: b[8]&1 != 0, notDst: b[8]&2 != 0}, nil
}

// decodeMultiport reads struct xt_multiport and xt_multiport_v1.
func decodeMultiport(b info, rev uint8) (any, error) {
	const most = 15 // XT_MULTI_PORTS
	if len(b) < 32 || rev == 1 && len(b) < 48 {
		return nil, errTruncated
	}
	m := multiportMatch{dst: b[0] == 1, invert: rev == 1 && b[47] != 0}
	count := min(int(b[1]), most)
	for i := 0; i < count; i++ {
		p := b.u16(2 + 2*i)
		r := portRange{p, p}
		if rev == 1 && b[32+i] != 0 && i+1 < count { // the next port ends a range
			i++
			r.last = b.u16(2 + 2*i)
		}
		m.ports = append(m.ports, r)
	}
	return m, nil
}

// decodeAddrtype reads struct xt_addrtype_info and xt_addrtype_info_v1.
func decodeAddrtype(b info, rev uint8) (any, error) {
	if len(b) < 8 || rev == 0 && len(b) < 12 {
		return nil, errTruncated
	}
	m := addrtypeMatch{src: b.u16(0), dst: b.u16(2)}
	if rev == 0 {
		m.notSrc, m.notDst = b.u32(4) != 0, b.u32(8) != 0
		return m, nil
	}
	flags := b.u32(4)
	m.notSrc, m.notDst, m.oneLink = flags&1 != 0, flags&2 != 0, flags&^3 != 0
	return m, nil
}

func decodeState(b info) (any, error) {
	if len(b) < 4 {
		return nil, errTruncated
	}
	return stateMatch{b.u32(0)}, nil
}

// decodeMark reads struct xt_mark_mtinfo1.
func decodeMark(b info) (any, error) {
	if len(b) < 9 {
		return nil, errTruncated
	}
	return markMatch{mark: b.u32(0), invert: b[8] != 0}, nil
}

// decodeRecent reads struct xt_recent_mtinfo and xt_recent_mtinfo_v1.
func decodeRecent(b info) (any, error) {
	const check, set, update = 1, 2, 4
	if len(b) < 11 {
		return nil, errTruncated
	}
	how, invert := b[8], b[9] != 0
	return recentMatch{
		list:      strings.ToValidUTF8(cstr(b[10:]), "?"),
		onlyAdds:  how&set != 0,
		uncertain: invert || how&(check|set|update) == 0,
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
	asked := func(bit uint16) condition { return condition{flags&bit != 0, invert&bit != 0} }
	m := conntrackMatch{
		state: asked(state), states: uint32(b[150]),
		protocol: asked(proto), proto: byte(b.u16(136)),
		origDst: asked(origDst),
		port:    asked(dstPort),
		other:   flags&^(state|proto|origDst|dstPort) != 0,
	}
	if rev >= 2 {
		m.states = uint32(b.u16(150))
	}
	n := 4
	if v6 {
		n = 16
	}
	if m.origDst.asked {
		var ok bool
		m.dst, ok = maskRange(b[32:32+n], b[48:48+n])
		m.holes = !ok
	}
	if m.port.asked {
		p := binary.BigEndian.Uint16(b[140:])
		m.ports = portRange{p, p}
		if rev == 3 {
			if len(b) < 162 {
				return nil, errTruncated
			}
			m.ports = portRange{b.u16(140), b.u16(156)}
		}
	}
	return m, nil
}

// natRange is where a DNAT or REDIRECT target sends packets.
type natRange struct {
	redirect bool
	addrs    addrRange // not valid: the address stays
	setsPort bool
	ports    portRange
	shift    bool   // a port p becomes ports.first + p - base
	base     uint16 // of shift
}

// decodeNAT reads the range of a DNAT or REDIRECT target. Its error says what is
// not understood.
func (e exprTarget) decodeNAT(v6 bool) (natRange, error) {
	n := natRange{redirect: e.name == "REDIRECT"}
	b := info(e.info)
	var flags uint32
	var first, last, ports info
	switch {
	case !v6 && e.rev == 0: // struct nf_nat_ipv4_multi_range_compat
		if len(b) < 20 || b.u32(0) != 1 {
			return n, errors.New("a range of several parts")
		}
		flags, first, last, ports = b.u32(4), b[8:12], b[12:16], b[16:20]
	case e.rev <= 2: // struct nf_nat_range, nf_nat_range2
		if len(b) < 40 || e.rev == 2 && len(b) < 42 {
			return n, errors.New("a short range")
		}
		flags, first, last, ports = b.u32(0), b[4:20], b[20:36], b[36:40]
		if !v6 {
			first, last = first[:4], last[:4]
		}
	default:
		return n, fmt.Errorf("revision %d of target %s", e.rev, e.name)
	}
	if flags&natNetmap != 0 {
		return n, errors.New("a prefix mapping")
	}
	if flags&natMapIPs != 0 && !n.redirect {
		n.addrs.first, _ = netip.AddrFromSlice(first)
		n.addrs.last, _ = netip.AddrFromSlice(last)
	}
	if flags&natProtoSet != 0 {
		n.setsPort = true
		n.ports = portRange{binary.BigEndian.Uint16(ports), binary.BigEndian.Uint16(ports[2:])}
	}
	if n.shift = n.setsPort && flags&natProtoShift != 0; n.shift {
		if e.rev != 2 {
			return n, errors.New("a shifted range in an old revision")
		}
		n.base = binary.BigEndian.Uint16(b[40:])
	}
	return n, nil
}
