// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// awaitReset waits, on a TCP connection whose end was read, until its peer resets
// it, and returns that error; nil when the read deadline passes or c is closed,
// and at once for other connections. The kernel raises EPOLLERR for a reset
// (tcp_reset in net/ipv4/tcp_input.c); a read would only return the end again.
func awaitReset(c net.Conn) error {
	var rc syscall.RawConn
	if tcp, ok := c.(*net.TCPConn); ok {
		rc, _ = tcp.SyscallConn() // nil once closed
	}
	if rc == nil {
		return nil
	}
	var reset error
	_ = rc.Read(func(fd uintptr) bool {
		errno, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && errno != 0 {
			reset = os.NewSyscallError("read", syscall.Errno(errno))
		}
		return err != nil || reset != nil
	})
	return reset
}

// hungUp reports whether a TCP connection is closed in both directions: it was
// reset, or both sides have sent their end.
func hungUp(c net.Conn) bool {
	tcp, ok := c.(interface {
		lingerer
		syscall.Conn
	})
	if !ok {
		return false
	}
	rc, err := tcp.SyscallConn()
	if err != nil {
		return false
	}
	hup := false
	_ = rc.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd)}}
		n, err := unix.Poll(fds, 0)
		hup = err == nil && n > 0 && fds[0].Revents&unix.POLLHUP != 0
	})
	return hup
}
