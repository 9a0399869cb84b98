// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// closePassed closes a descriptor that a client passed. Where it is the last one of a
// connection, close(2) would wait as long as the client set with SO_LINGER. So the
// connection is reset.
func closePassed(fd int) {
	reset(fd)
	_ = unix.Close(fd)
}

// reset makes the end of a connection a reset, which needs no wait.
func reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// closeClient closes the agent's end of a client's connection. The descriptors in unread
// messages are closed first, because the kernel would close them with the connection.
func closeClient(conn *net.UnixConn) {
	_ = control(conn, func(fd int) error {
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
	var p packet
	_ = p.parse(oob[:oobn])
	p.close()
	return true
}

// arrival is a connection that was accepted. Close does not wait, because the goroutine
// that accepts calls it.
type arrival struct{ *net.UnixConn }

// Close implements net.Conn.
func (a arrival) Close() error {
	go closeClient(a.UnixConn)
	return nil
}

// arrivals is a listener whose connections are arrivals.
type arrivals struct{ net.Listener }

// Accept implements net.Listener.
func (l arrivals) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return arrival{conn.(*net.UnixConn)}, nil
}

// waitAtMost waits for a group, but no longer than d.
func waitAtMost(group *sync.WaitGroup, d time.Duration) {
	done := make(chan struct{})
	go func() {
		group.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(d):
	}
}
