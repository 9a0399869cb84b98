// SPDX-License-Identifier: Apache-2.0

//go:build unix

package forward

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Readable waits until a socket has something to read, so that a large buffer is
// held only while it is used. It returns the error that ends the wait, at once
// and nil where waiting is not possible; a pending error of the socket counts as
// something to read. One goroutine at a time may wait.
func Readable(c net.Conn) func() error {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return func() error { return nil }
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return func() error { return nil }
	}
	fds := make([]unix.PollFd, 1)
	ready := func(fd uintptr) bool {
		fds[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		n, err := unix.Poll(fds, 0)
		for err == unix.EINTR {
			n, err = unix.Poll(fds, 0)
		}
		return n != 0 || err != nil
	}
	return func() error { return rc.Read(ready) }
}
