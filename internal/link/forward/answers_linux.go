// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

// receiveAt has a socket tell the address of each datagram, IP_PKTINFO and IPV6_PKTINFO of
// ip(7) and ipv6(7), and returns room for that; nil if it cannot. A socket of both families
// has both.
func receiveAt(conn *net.UDPConn) []byte {
	rc, err := conn.SyscallConn()
	if err != nil {
		return nil
	}
	told := false
	_ = rc.Control(func(fd uintptr) {
		told = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_PKTINFO, 1) == nil
		told = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1) == nil || told
	})
	if !told {
		return nil
	}
	return make([]byte, unix.CmsgSpace(unix.SizeofInet4Pktinfo)+unix.CmsgSpace(unix.SizeofInet6Pktinfo))
}

// arrivedAt returns the address that a datagram was sent to, from its control messages: the
// zero Addr if answers cannot come from there, as it is of a group.
func arrivedAt(control []byte) (at netip.Addr) {
	for len(control) >= unix.SizeofCmsghdr {
		h, data, rest, err := unix.ParseOneSocketControlMessage(control)
		if err != nil {
			return at
		}
		control = rest
		switch {
		case h.Level == unix.SOL_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			return at4(data)
		case h.Level == unix.SOL_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			at = at6(data) // of IPv4 it is mapped, and IP_PKTINFO follows
		}
	}
	return at
}

// at4 is of struct in_pktinfo: the index of an interface, the address to answer from, and
// the one in the header. The kernel does not have the second of what came before receiveAt.
func at4(data []byte) netip.Addr {
	at := netip.AddrFrom4([4]byte(data[4:8]))
	if at.IsUnspecified() {
		at = netip.AddrFrom4([4]byte(data[8:12]))
	}
	return single(at)
}

// at6 is of struct in6_pktinfo: the address in the header, and the index of an interface.
func at6(data []byte) netip.Addr {
	at := netip.AddrFrom16([16]byte(data[:16])).Unmap()
	if at.Is6() && at.IsLinkLocalUnicast() {
		at = at.WithZone(strconv.FormatUint(uint64(binary.NativeEndian.Uint32(data[16:])), 10))
	}
	return single(at)
}

// single returns at if it is the address of one machine, else the zero Addr.
func single(at netip.Addr) netip.Addr {
	if at.IsMulticast() || at.IsUnspecified() || at == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return netip.Addr{}
	}
	return at
}

// sourceControl returns the control message by which a datagram leaves from an address, nil
// for the zero Addr.
func sourceControl(at netip.Addr) []byte {
	switch {
	case !at.IsValid():
		return nil
	case at.Is4():
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: at.As4()})
	}
	index, _ := strconv.ParseUint(at.Zone(), 10, 32) // 0, any interface, without a zone
	return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: at.As16(), Ifindex: uint32(index)})
}
