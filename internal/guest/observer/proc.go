// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/port"
)

// owner is a process that holds a socket.
type owner struct {
	pid     uint32
	comm    string
	started time.Duration // since boot, as Stat has it
}

// before reports whether o is the owner of a socket that p has, too.
func (o owner) before(p owner) bool {
	return cmp.Or(cmp.Compare(o.started, p.started), cmp.Compare(o.pid, p.pid)) < 0
}

// ownerFinder finds the processes that have sockets. There is no index from socket to
// process, so it reads the descriptors of all processes. A search that uses up its budget
// is continued by another.
type ownerFinder struct {
	proc   string // "/proc"
	budget int    // descriptors to read in one search
	// mptcp maps the addresses of MPTCP listeners to the inodes that programs
	// hold; nil if that is unknown.
	mptcp func() (map[netip.AddrPort]uint32, error)
}

const ownerBudget = 200_000

// findings is the result of one search.
type findings struct {
	owners map[uint64]owner // by cookie
	next   uint32           // the pid to go on with; 0 if the search came to the end
	denied bool             // the descriptors of a process could not be read
}

// find searches the processes whose pid is from or higher. A process that it begins
// with it reads to the end, beyond the budget, so that each search makes progress.
func (f *ownerFinder) find(ctx context.Context, sockets []Socket, from uint32) (r findings) {
	r.owners = make(map[uint64]owner)
	cookies := inodes(sockets, f.aliases())
	if len(cookies) == 0 {
		return r
	}
	pids, err := f.pids(from)
	r.denied = err != nil
	budget := f.budget
	for _, pid := range pids {
		if ctx.Err() != nil || budget <= 0 {
			r.next = pid
			return r
		}
		read, err := f.scan(pid, cookies, func(inode uint32, o owner) bool {
			for _, cookie := range cookies[inode] {
				if old, ok := r.owners[cookie]; !ok || o.before(old) {
					r.owners[cookie] = o
				}
			}
			return true
		})
		budget -= read
		r.denied = r.denied || err != nil
	}
	return r
}

// scan calls holds with the inodes of cookies that a process has, until it returns false, and
// returns how many descriptors it read. A process that has ended has none. Its first thread
// alone may have ended.
func (f *ownerFinder) scan(pid uint32, cookies map[uint32][]uint64, holds func(inode uint32, o owner) bool) (read int, err error) {
	process := filepath.Join(f.proc, strconv.FormatUint(uint64(pid), 10))
	var o owner // once it is read
	var denied error
	descriptors := func(thread, stat string) error {
		return eachName(filepath.Join(thread, "fd"), func(dir int, fd string) bool {
			read++
			inode, err := socketInode(dir, fd)
			if errors.Is(err, os.ErrPermission) {
				denied = err
			}
			if cookies[inode] == nil {
				return true
			}
			if o.pid == 0 {
				b, err := cgroup.ReadAt(dir, stat, maxStat)
				if err != nil {
					return false // it has ended
				}
				// Its pid may be another process's by now, but not this directory.
				parsed, err := ParseStat(b)
				if err != nil {
					return false
				}
				o = owner{pid, parsed.Name, parsed.Started}
			}
			return holds(inode, o)
		})
	}
	if err = descriptors(process, "../stat"); err == nil && read == 0 {
		err = eachName(filepath.Join(process, "task"), func(_ int, thread string) bool {
			_ = descriptors(filepath.Join(process, "task", thread), "../../../stat")
			return read == 0
		})
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		err = nil
	}
	return read, cmp.Or(err, denied)
}

const maxStat = 4096

// holders returns the sockets that their process still has, with its name now. What cannot
// be read is as it was.
func (f *ownerFinder) holders(ctx context.Context, sockets []Socket) map[uint64]owner {
	held := make(map[uint64]owner, len(sockets))
	aliases := f.aliases()
	slices.SortFunc(sockets, func(a, b Socket) int { return cmp.Compare(a.PID, b.PID) })
	for len(sockets) > 0 {
		pid, n := sockets[0].PID, 1
		for n < len(sockets) && sockets[n].PID == pid {
			n++
		}
		of := sockets[:n]
		sockets = sockets[n:]
		cookies := inodes(of, aliases)
		_, err := f.scan(pid, cookies, func(inode uint32, o owner) bool {
			for _, cookie := range cookies[inode] {
				held[cookie] = o
			}
			delete(cookies, inode)
			return len(cookies) > 0
		})
		unread := err != nil || ctx.Err() != nil
		for i := range of {
			if _, ok := held[of[i].Cookie]; !ok && (unread || of[i].Inode == 0) {
				held[of[i].Cookie] = owner{pid: of[i].PID, comm: of[i].Comm}
			}
		}
	}
	return held
}

// pids returns the pids of /proc that are from or higher, in order.
func (f *ownerFinder) pids(from uint32) (pids []uint32, err error) {
	err = eachName(f.proc, func(_ int, name string) bool {
		if pid, err := strconv.ParseUint(name, 10, 32); err == nil && uint32(pid) >= from {
			pids = append(pids, uint32(pid))
		}
		return true
	})
	slices.Sort(pids)
	return pids, err
}

// aliases maps the addresses of MPTCP listeners to the inodes that programs hold.
func (f *ownerFinder) aliases() map[netip.AddrPort]uint32 {
	if f.mptcp == nil {
		return nil
	}
	aliases, _ := f.mptcp() // a kernel without MPTCP has none
	return aliases
}

// inodes returns the cookies of sockets by the inodes that programs hold.
func inodes(sockets []Socket, aliases map[netip.AddrPort]uint32) map[uint32][]uint64 {
	cookies := make(map[uint32][]uint64, len(sockets))
	for i := range sockets {
		s := &sockets[i]
		inode := s.Inode
		if alias, ok := aliases[netip.AddrPortFrom(s.Address, s.Port)]; ok && s.Protocol == port.TCP && s.Listening {
			inode = alias
		}
		if inode != 0 {
			cookies[inode] = append(cookies[inode], s.Cookie)
		}
	}
	return cookies
}

// Now returns CLOCK_MONOTONIC in nanoseconds, as PIDSeen of a Socket has it; 0 if it cannot
// be read.
func Now() int64 { return readClock(unix.CLOCK_MONOTONIC) }

// threadTime returns the processor time of the calling thread, 0 if it cannot be read.
func threadTime() time.Duration { return time.Duration(readClock(unix.CLOCK_THREAD_CPUTIME_ID)) }

func readClock(id int32) int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		return 0
	}
	return ts.Nano()
}

// eachName calls f with the names in a directory, whose descriptor it gives,
// until f returns false.
func eachName(path string, f func(dir int, name string) bool) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	fd := int(d.Fd())
	for {
		names, err := d.Readdirnames(256)
		for _, name := range names {
			if !f(fd, name) {
				return nil
			}
		}
		if errors.Is(err, io.EOF) || err == nil && len(names) == 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read directory: %w", err)
		}
	}
}

// socketInode reads a link of /proc/PID/fd and returns N of "socket:[N]", 0 for another.
func socketInode(dir int, name string) (uint32, error) {
	var b [64]byte
	n, err := unix.Readlinkat(dir, name, b[:])
	if err != nil {
		return 0, err
	}
	number, ok := bytes.CutPrefix(b[:n], []byte("socket:["))
	if !ok {
		return 0, nil
	}
	inode, err := strconv.ParseUint(string(bytes.TrimSuffix(number, []byte("]"))), 10, 32)
	if err != nil {
		return 0, nil //nolint:nilerr // no socket has such a number
	}
	return uint32(inode), nil
}
