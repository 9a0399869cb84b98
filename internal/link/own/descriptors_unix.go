// SPDX-License-Identifier: Apache-2.0

//go:build unix

package own

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// Descriptors returns how many file descriptors this process may have, 0 for any
// number. The runtime of Go raises the soft limit to the hard one at start.
func Descriptors() uint64 {
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &r) != nil {
		return 0
	}
	return r.Cur
}

// Scarce reports whether a socket (a syscall.Conn) has one of the last descriptors,
// which are kept for other uses. As the kernel gives each the lowest free number,
// the number tells how many are in use.
func Scarce(socket any, use Use) bool {
	c, ok := socket.(syscall.Conn)
	if !ok {
		return false
	}
	rc, err := c.SyscallConn()
	if err != nil {
		return false
	}
	scarce := false
	_ = rc.Control(func(fd uintptr) { scarce = ScarceFD(int(fd), use) })
	return scarce
}

// ScarceFD is Scarce of a descriptor.
func ScarceFD(fd int, use Use) bool {
	limit := Descriptors()
	return limit > 0 && uint64(fd) >= limit-reserve(limit, use)
}
