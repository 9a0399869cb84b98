// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
)

// owner is a process that holds a socket.
type owner struct {
	pid  uint32
	comm string
}

// ownerFinder finds the processes of sockets that only a dump knows. There is no
// index from socket to process, so it reads the descriptors of all processes, up to
// a budget, and stops when all are found.
type ownerFinder struct {
	proc   string // "/proc"
	budget int    // descriptors to read in one search
	// mptcp maps the addresses of MPTCP listeners to the inodes that programs
	// hold; nil if that is unknown.
	mptcp func() (map[netip.AddrPort]uint32, error)
}

const ownerBudget = 200_000

// find returns the owners that it found, by cookie.
func (f *ownerFinder) find(ctx context.Context, sockets []Socket) map[uint64]owner {
	cookies := make(map[uint32][]uint64, len(sockets)) // by inode
	var aliases map[netip.AddrPort]uint32
	if f.mptcp != nil {
		aliases, _ = f.mptcp() // a kernel without MPTCP has none
	}
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
	owners := make(map[uint64]owner)
	budget := f.budget
	_ = eachName(f.proc, func(_ int, name string) bool {
		pid, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			return true
		}
		if ctx.Err() != nil || len(cookies) == 0 || budget <= 0 {
			return false
		}
		comm, known := "", false
		_ = eachName(filepath.Join(f.proc, name, "fd"), func(dir int, fd string) bool {
			budget--
			inode, ok := socketInode(dir, fd)
			if !ok || cookies[inode] == nil {
				return budget > 0
			}
			if !known {
				b, _ := os.ReadFile(filepath.Join(f.proc, name, "comm"))
				comm, known = string(bytes.TrimSuffix(b, []byte("\n"))), true
			}
			for _, cookie := range cookies[inode] {
				owners[cookie] = owner{pid: uint32(pid), comm: comm}
			}
			delete(cookies, inode)
			return budget > 0 && len(cookies) > 0
		})
		return true
	})
	return owners
}

// monotonicNow returns CLOCK_MONOTONIC in nanoseconds, 0 if it cannot be read.
func monotonicNow() int64 { return readClock(unix.CLOCK_MONOTONIC) }

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

// socketInode reads a link of /proc/PID/fd and returns N of "socket:[N]".
func socketInode(dir int, name string) (uint32, bool) {
	var b [64]byte
	n, err := unix.Readlinkat(dir, name, b[:])
	if err != nil {
		return 0, false
	}
	number, ok := bytes.CutPrefix(b[:n], []byte("socket:["))
	if !ok {
		return 0, false
	}
	inode, err := strconv.ParseUint(string(bytes.TrimSuffix(number, []byte("]"))), 10, 32)
	return uint32(inode), err == nil
}
