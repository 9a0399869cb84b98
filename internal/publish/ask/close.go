// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ask

import (
	"net"

	"golang.org/x/sys/unix"
)

// CloseFD closes a descriptor that a client passed. Where it is the last one of a
// connection, close(2) would wait as long as the client set with SO_LINGER. So the
// connection is reset.
func CloseFD(fd int) {
	Reset(fd)
	_ = unix.Close(fd)
}

// Reset makes the end of a connection a reset, which needs no wait.
func Reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// CloseClient closes the agent's end of a client's connection. The descriptors in unread
// messages are closed first, because the kernel would close them with the connection.
func CloseClient(conn *net.UnixConn) {
	_ = Control(conn, func(fd int) error {
		_ = unix.Shutdown(fd, unix.SHUT_RD) // no message can arrive any more
		// Each message has a control message then; the end has none.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
		for drain(fd) {
		}
		return nil
	})
	_ = conn.Close()
}

// drain discards one message, and reports false if there is none.
func drain(fd int) bool {
	var buf [1]byte
	oob := make([]byte, maxControl)
	n, oobn, _, _, err := unix.Recvmsg(fd, buf[:], oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err == unix.EINTR {
		return true
	}
	if err != nil || n == 0 && oobn == 0 {
		return false
	}
	var p Packet
	_ = p.parse(oob[:oobn])
	p.Close()
	return true
}
