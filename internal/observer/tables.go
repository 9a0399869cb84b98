// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
)

// readTables returns the sockets with the local port p in the network namespace of a
// process, from /proc/PID/net.
func readTables(p uint16, s space) (list []Found, err error) {
	var errs []error
	used := usedTables(s.process)
	for _, t := range []struct {
		name     string
		protocol port.Protocol
	}{{"tcp", port.TCP}, {"tcp6", port.TCP}, {"udp", port.UDP}, {"udp6", port.UDP}} {
		if !used[t.name] {
			continue
		}
		f, err := os.Open(filepath.Join(s.process, "net", t.name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // no IPv6, or the process has ended
		}
		if err == nil {
			list, err = appendTable(list, f, t.protocol, p)
			_ = f.Close()
		}
		errs = append(errs, err)
	}
	for i := range list {
		list[i].Space, list[i].NetNS = s.title(), uint32(s.inode)
	}
	return list, errors.Join(errs...)
}

// usedTables returns which tables of /proc/PID/net have sockets. To read one of TCP, the
// kernel walks the connections of all namespaces, which takes it milliseconds.
func usedTables(process string) map[string]bool {
	used := make(map[string]bool)
	for _, name := range []string{"sockstat", "sockstat6"} {
		b, err := os.ReadFile(filepath.Join(process, "net", name))
		if err != nil {
			continue // no IPv6, or the process has ended
		}
		for line := range strings.Lines(string(b)) {
			protocol, counts, _ := strings.Cut(line, ": ")
			n, _, _ := strings.Cut(strings.TrimPrefix(counts, "inuse "), " ")
			used[strings.ToLower(protocol)] = strings.TrimSpace(n) != "0"
		}
	}
	return used
}

// appendTable appends the sockets with the local port p in a table of /proc/net that serve,
// or could.
func appendTable(list []Found, r io.Reader, protocol port.Protocol, p uint16) ([]Found, error) {
	const established, closed = 1, 7
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		// sl local_address rem_address st queues timer retransmits uid timeout inode
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || fields[0] == "sl" {
			continue
		}
		at, err := parseTableAddress(fields[1])
		if err != nil {
			return list, err
		}
		state, err := strconv.ParseUint(fields[3], 16, 8)
		if err != nil {
			return list, fmt.Errorf("state %q: %w", fields[3], err)
		}
		serves := protocol == port.TCP && state == tcpListen || protocol == port.UDP && (state == closed || state == established)
		if at.Port() != p || !serves {
			continue
		}
		inode, _ := strconv.ParseUint(fields[9], 10, 32)
		list = append(list, Found{
			Socket: Socket{Protocol: protocol, Address: at.Addr(), Port: p, Listening: protocol == port.TCP, Inode: uint32(inode)},
			Client: protocol == port.UDP && state == established,
		})
	}
	return list, lines.Err()
}

// parseTableAddress parses "0100007F:1F90": each 32 bits of the address as a number of this
// machine, and the port.
func parseTableAddress(s string) (netip.AddrPort, error) {
	host, number, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	if err != nil || len(b) != 4 && len(b) != 16 {
		return netip.AddrPort{}, fmt.Errorf("address %q: %w", s, unix.EINVAL)
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	p, err := strconv.ParseUint(number, 16, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("address %q: %w", s, err)
	}
	addr, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(addr.Unmap(), uint16(p)), nil
}
