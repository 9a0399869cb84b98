// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

func systemHolders() HolderFinder { return procHolders{"/proc"} }

// procHolders reads /proc: net/tcp and the like for the inodes of sockets, and
// PID/fd for the processes that have them open. Only root can read the descriptors
// of other users' processes.
type procHolders struct{ root string }

// Holders implements HolderFinder.
func (f procHolders) Holders(ctx context.Context, sockets []Socket) (map[Socket]Holder, error) {
	inodes := make(map[uint64][]Socket)
	var errs []error
	read := 0
	for _, table := range []struct {
		name     string
		protocol port.Protocol
	}{{"tcp", port.TCP}, {"tcp6", port.TCP}, {"udp", port.UDP}, {"udp6", port.UDP}} {
		// thread-self: another thread may be in another network namespace.
		file, err := os.Open(filepath.Join(f.root, "thread-self/net", table.name))
		if err != nil {
			errs = append(errs, err) // without IPv6 there is no tcp6
			continue
		}
		err = parseSockets(file, table.protocol, func(addr netip.AddrPort, inode uint64) {
			for _, s := range sockets {
				if s.Protocol == table.protocol && (excludes(addr, s.Addr) || maybeDual(addr, s.Addr)) {
					inodes[inode] = append(inodes[inode], s)
				}
			}
		})
		_ = file.Close()
		if err != nil {
			errs = append(errs, fmt.Errorf("read %s: %w", table.name, err))
			continue
		}
		read++
	}
	if read == 0 {
		return nil, errors.Join(errs...)
	}
	return f.owners(ctx, inodes)
}

// owners finds the processes that have sockets open.
func (f procHolders) owners(ctx context.Context, inodes map[uint64][]Socket) (map[Socket]Holder, error) {
	out := make(map[Socket]Holder)
	if len(inodes) == 0 {
		return out, nil
	}
	dir, err := os.Open(f.root)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if ctx.Err() != nil {
			return out, ctx.Err()
		}
		fds, err := os.ReadDir(filepath.Join(f.root, name, "fd"))
		if err != nil {
			continue // it ended, or we may not read it
		}
		for _, fd := range fds {
			to, err := os.Readlink(filepath.Join(f.root, name, "fd", fd.Name()))
			if err != nil {
				continue
			}
			inode, ok := socketInode(to)
			if !ok {
				continue
			}
			for _, s := range inodes[inode] {
				if _, known := out[s]; !known {
					comm, _ := os.ReadFile(filepath.Join(f.root, name, "comm"))
					out[s] = Holder{PID: pid, Name: strings.TrimSuffix(string(comm), "\n")}
				}
			}
		}
	}
	return out, nil
}

// socketInode reads "socket:[4711]".
func socketInode(link string) (uint64, bool) {
	s, ok := strings.CutPrefix(link, "socket:[")
	if !ok {
		return 0, false
	}
	inode, err := strconv.ParseUint(strings.TrimSuffix(s, "]"), 10, 64)
	return inode, err == nil
}

// parseSockets yields the sockets that listen (TCP) or are unconnected (UDP) in
// a table of /proc/net (get_tcp4_sock in net/ipv4/tcp_ipv4.c): state 0A and 07.
func parseSockets(r io.Reader, protocol port.Protocol, yield func(addr netip.AddrPort, inode uint64)) error {
	state := "0A"
	if protocol == port.UDP {
		state = "07"
	}
	sc := bufio.NewScanner(r)
	sc.Scan() // the heading
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) < 10 || f[3] != state {
			continue
		}
		addr, err := parseHexAddr(f[1])
		if err != nil {
			return err
		}
		inode, err := strconv.ParseUint(f[9], 10, 64)
		if err != nil {
			return fmt.Errorf("inode: %w", err)
		}
		yield(addr, inode)
	}
	return sc.Err()
}

// parseHexAddr reads "0100007F:1F90": words in the byte order of the machine.
func parseHexAddr(s string) (netip.AddrPort, error) {
	ip, p, ok := strings.Cut(s, ":")
	b, err := hex.DecodeString(ip)
	if !ok || err != nil || len(b) != 4 && len(b) != 16 {
		return netip.AddrPort{}, fmt.Errorf("address %q: want hexadecimal ADDRESS:PORT", s)
	}
	n, err := strconv.ParseUint(p, 16, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("address %q: port: %w", s, err)
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(n)), nil
}
