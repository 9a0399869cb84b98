// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/fairlead/fairlead/internal/port/claims"
)

// The tables of the IP helper API (tcpmib.h, udpmib.h) are parsed in this file, so
// that it is tested on every system.

// ownerTable is how one of its tables is laid out: a count, then rows.
type ownerTable struct {
	row, addr, addrLen, port, pid int // sizes and offsets in bytes
}

var (
	tcp4Owners = ownerTable{24, 4, 4, 8, 20}   // MIB_TCPROW_OWNER_PID
	tcp6Owners = ownerTable{56, 0, 16, 20, 52} // MIB_TCP6ROW_OWNER_PID
	udp4Owners = ownerTable{12, 0, 4, 4, 8}    // MIB_UDPROW_OWNER_PID
	udp6Owners = ownerTable{28, 0, 16, 20, 24} // MIB_UDP6ROW_OWNER_PID
)

// parse yields what the sockets of a table are bound to, and their processes.
func (t ownerTable) parse(b []byte, yield func(addr netip.AddrPort, pid int)) error {
	const count = 4
	if len(b) < count {
		return fmt.Errorf("table of %d bytes", len(b))
	}
	n := int(binary.LittleEndian.Uint32(b))
	if rest := len(b) - count; n > rest/t.row {
		return fmt.Errorf("table of %d rows in %d bytes", n, rest)
	}
	for i := range n {
		r := b[count+i*t.row:][:t.row]
		ip, _ := netip.AddrFromSlice(r[t.addr:][:t.addrLen])
		// The port is in network order in the first half of its field.
		yield(netip.AddrPortFrom(ip.Unmap(), binary.BigEndian.Uint16(r[t.port:])), int(binary.LittleEndian.Uint32(r[t.pid:])))
	}
	return nil
}

// excludes reports whether a socket bound to addr excludes another at want.
func excludes(addr, want netip.AddrPort) bool {
	without := func(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().WithZone(""), a.Port()) }
	return claims.Overlap(without(addr), without(want))
}

// maybeDual reports whether addr is the IPv6 wildcard, which may take IPv4 as well:
// the system's tables do not tell.
func maybeDual(addr, want netip.AddrPort) bool {
	return addr.Port() == want.Port() && addr.Addr() == netip.IPv6Unspecified()
}
