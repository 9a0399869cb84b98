// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/procnet"
)

func systemHolders() HolderFinder { return procHolders{"/proc"} }

// procHolders reads /proc: net/tcp and the like for the inodes of sockets, and
// PID/fd for the processes that have them open. Only root can read the descriptors
// of other users' processes.
type procHolders struct{ root string }

// Holders implements HolderFinder.
func (f procHolders) Holders(ctx context.Context, sockets []Socket) (map[Socket]Holder, error) {
	inodes := make(map[uint64][]Socket)
	var missing, failed error
	read := 0
	for _, table := range procnet.Tables() {
		// thread-self: another thread may be in another network namespace.
		err := procnet.Read(filepath.Join(f.root, "thread-self/net", table.Name), func(found procnet.Socket) {
			if found.State != serving(table.Protocol) {
				return
			}
			for _, s := range sockets {
				if s.Protocol == table.Protocol && (excludes(found.Local, s.Addr) || maybeDual(found.Local, s.Addr)) {
					inodes[found.Inode] = append(inodes[found.Inode], s)
				}
			}
		})
		switch {
		case errors.Is(err, fs.ErrNotExist):
			missing = err // without IPv6 there is no tcp6
		case err != nil:
			failed = errors.Join(failed, err)
		default:
			read++
		}
	}
	if read == 0 {
		return nil, cmp.Or(failed, missing)
	}
	out, err := f.owners(ctx, inodes)
	return out, errors.Join(failed, err)
}

// serving is the state of a socket that others can connect to.
func serving(p port.Protocol) uint8 {
	if p == port.UDP {
		return procnet.Close
	}
	return procnet.Listen
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
