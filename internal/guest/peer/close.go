// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peer

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// CloseFD closes a descriptor that a client passed. Where it is the last one of a
// connection, close(2) would wait as long as the client set with SO_LINGER. So the
// connection is reset. What waits in a unix socket is closed first, in the same way.
func CloseFD(fd int) {
	for open := []int{fd}; len(open) > 0; {
		last := len(open) - 1
		if more := unread(open[last]); len(more) > 0 {
			open = append(open, more...)
			continue
		}
		Reset(open[last])
		_ = unix.Close(open[last])
		open = open[:last]
	}
}

// Reset makes the end of a connection a reset, which needs no wait.
func Reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// CloseClient closes the server's end of a client's connection. The descriptors in unread
// messages are closed first, because the kernel would close them with the connection.
func CloseClient(conn *net.UnixConn) {
	_ = Control(conn, closeUnread)
	_ = conn.Close()
}

// CloseListener closes a listener of clients. Those that were not accepted are closed as by
// CloseClient.
func CloseListener(l net.Listener) error {
	if c, ok := l.(syscall.Conn); ok {
		_ = Control(c, closeUnread)
	}
	return l.Close()
}

// closeUnread closes all that unread returns.
func closeUnread(fd int) error {
	for p := (Packet{FDs: unread(fd)}); len(p.FDs) > 0; p.FDs = unread(fd) {
		p.Close()
	}
	return nil
}

// unread returns some of the descriptors that the kernel would close with a unix socket:
// those in a message that was not read, or a connection that was not accepted. It returns
// none when there are none, and then none can be added.
func unread(fd int) []int {
	if family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err != nil || family != unix.AF_UNIX {
		return nil
	}
	_ = unix.Shutdown(fd, unix.SHUT_RD)
	if listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err == nil && listens != 0 {
		return accepted(fd)
	}
	// Each packet has a control message then; the end has none.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return nil
	}
	for buf, oob := make([]byte, maxMessage), NewControl(); ; {
		n, oobn, _, _, err := unix.Recvmsg(fd, buf, oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		switch {
		case again(err):
			continue
		case err != nil || n == 0 && (oobn == 0 || kind == unix.SOCK_STREAM):
			return nil
		}
		var p Packet
		if _ = p.parse(oob[:oobn]); len(p.FDs) > 0 {
			return p.FDs
		}
	}
}

// accepted returns a connection that waits at a listener which is shut down, where accept(2)
// does not block.
func accepted(fd int) []int {
	for {
		conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
		switch {
		case again(err):
			continue
		case err != nil:
			return nil
		}
		return []int{conn}
	}
}

// again reports whether a call is to be repeated. The kernel reports once that the peer did
// not read all, whatever is there to read.
func again(err error) bool { return errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNRESET) }
