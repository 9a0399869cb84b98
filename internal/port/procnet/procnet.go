// SPDX-License-Identifier: Apache-2.0

// Package procnet reads the tables of sockets in /proc/net.
package procnet

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// States of include/net/tcp_states.h. A UDP socket is Established if it is connected, else
// Close.
const (
	Established = 1
	Close       = 7
	Listen      = 10
)

// Table is a table of /proc/net.
type Table struct {
	Name     string
	Protocol port.Protocol
}

// Tables returns the tables of sockets with ports. Without IPv6 there is no tcp6 nor udp6.
func Tables() []Table {
	return []Table{{"tcp", port.TCP}, {"tcp6", port.TCP}, {"udp", port.UDP}, {"udp6", port.UDP}}
}

// Socket is a line of a table.
type Socket struct {
	Local netip.AddrPort // IPv4 even if the table has it as an IPv6 address
	State uint8
	Inode uint64 // 0 without a file, as in TIME_WAIT
}

// Read yields the sockets in the table with this path.
func Read(path string, yield func(Socket)) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := Parse(f, yield); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// Parse yields the sockets in a table (get_tcp4_sock in net/ipv4/tcp_ipv4.c).
func Parse(r io.Reader, yield func(Socket)) error {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		// sl local_address rem_address st queues timer retransmits uid timeout inode
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || fields[0] == "sl" {
			continue
		}
		s, err := parseSocket(fields)
		if err != nil {
			return err
		}
		yield(s)
	}
	return lines.Err()
}

func parseSocket(fields []string) (Socket, error) {
	local, err := parseAddrPort(fields[1])
	if err != nil {
		return Socket{}, err
	}
	state, err := strconv.ParseUint(fields[3], 16, 8)
	if err != nil {
		return Socket{}, fmt.Errorf("state: %w", err)
	}
	inode, err := strconv.ParseUint(fields[9], 10, 64)
	if err != nil {
		return Socket{}, fmt.Errorf("inode: %w", err)
	}
	return Socket{local, uint8(state), inode}, nil
}

// parseAddrPort parses "0100007F:1F90".
func parseAddrPort(s string) (netip.AddrPort, error) {
	host, number, _ := strings.Cut(s, ":")
	addr, err := ParseAddr(host)
	if err != nil {
		return netip.AddrPort{}, err
	}
	p, err := strconv.ParseUint(number, 16, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("address %q: port: %w", s, err)
	}
	return netip.AddrPortFrom(addr.Unmap(), uint16(p)), nil
}

// ParseAddr parses "0100007F": each 32 bits of the address are a number in this machine's
// byte order, in hexadecimal.
func ParseAddr(s string) (netip.Addr, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 4 && len(b) != 16 {
		return netip.Addr{}, fmt.Errorf("address %q: want 8 or 32 hexadecimal digits", s)
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	addr, _ := netip.AddrFromSlice(b)
	return addr, nil
}
