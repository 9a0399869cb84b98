// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"io"
	"net/netip"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// lsofFind finds holders in the output of "lsof -FpcPtn": one field on each line,
// after a letter; p begins a process, f a file.
func lsofFind(r io.Reader, sockets []Socket) (map[Socket]Holder, error) {
	out := make(map[Socket]Holder)
	var by Holder
	var protocol port.Protocol
	is6 := false
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		line := sc.Text()
		if line == "" {
			continue
		}
		value := line[1:]
		switch line[0] {
		case 'p':
			pid, _ := strconv.Atoi(value)
			by = Holder{PID: pid}
		case 'c':
			by.Name = value
		case 'f':
			protocol, is6 = 0, false
		case 't':
			is6 = value == "IPv6"
		case 'P':
			protocol, _ = port.ParseProtocol(strings.ToLower(value))
		case 'n':
			addr, ok := lsofAddr(value, is6)
			for _, s := range sockets {
				if _, known := out[s]; ok && !known && s.Protocol == protocol && (excludes(addr, s.Addr) || maybeDual(addr, s.Addr)) {
					out[s] = by
				}
			}
		}
	}
	return out, sc.Err()
}

// lsofAddr parses "127.0.0.1:80", "[::1]:80" or "*:80", and refuses connections.
func lsofAddr(s string, is6 bool) (netip.AddrPort, bool) {
	if strings.Contains(s, "->") {
		return netip.AddrPort{}, false
	}
	if p, ok := strings.CutPrefix(s, "*:"); ok {
		n, err := strconv.ParseUint(p, 10, 16)
		any := netip.IPv4Unspecified()
		if is6 {
			any = netip.IPv6Unspecified()
		}
		return netip.AddrPortFrom(any, uint16(n)), err == nil
	}
	a, err := netip.ParseAddrPort(s)
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port()), err == nil
}
