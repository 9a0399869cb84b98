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
	rc := rawTCP(c)
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

// rawTCP returns the socket of a TCP connection, nil for others and once it is closed.
func rawTCP(c net.Conn) syscall.RawConn {
	tcp, ok := c.(interface {
		lingerer
		syscall.Conn
	})
	if !ok {
		return nil
	}
	rc, err := tcp.SyscallConn()
	if err != nil {
		return nil
	}
	return rc
}

// hungUp reports whether a TCP connection is closed in both directions: it was
// reset, or both sides have sent their end.
func hungUp(c net.Conn) bool {
	_, tcp := c.(lingerer)
	return tcp && polls(c, unix.POLLHUP)
}

// lost returns the error of a TCP connection that was reset, or timed out, and nil for
// other connections. It takes the error from the kernel. EPIPE is a reset after the
// peer's end (tcp_reset in net/ipv4/tcp_input.c): all that the peer sent has arrived.
func lost(c net.Conn) (reset error) {
	rc := rawTCP(c)
	if rc == nil {
		return nil
	}
	_ = rc.Control(func(fd uintptr) {
		errno, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && errno != 0 && syscall.Errno(errno) != unix.EPIPE {
			reset = os.NewSyscallError("read", syscall.Errno(errno))
		}
	})
	return reset
}

// peerClosed reports whether the peer of a link's connection has closed it. It never
// closes one direction alone.
func peerClosed(c net.Conn) bool { return polls(c, unix.POLLRDHUP|unix.POLLHUP) }

func polls(c net.Conn, events int16) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	is := false
	_ = rc.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
		n, err := unix.Poll(fds, 0)
		is = err == nil && n > 0 && fds[0].Revents&events != 0
	})
	return is
}
