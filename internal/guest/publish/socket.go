// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// listenerOf makes a listener of a descriptor, which it owns, and requires that it is
// bound to the loopback: the port is for the container alone.
func listenerOf(fd int) (*net.TCPListener, error) {
	peer.Reset(fd)
	f := fileOf(fd)
	defer func() { _ = f.Close() }()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, peer.Refuse(peer.ReasonDescriptor, "the descriptor is no listening TCP socket")
	}
	t, ok := l.(*net.TCPListener)
	if !ok || !t.Addr().(*net.TCPAddr).IP.IsLoopback() {
		_ = l.Close()
		return nil, peer.Refuse(peer.ReasonDescriptor, "the socket does not listen on the container's loopback")
	}
	return t, nil
}

// closeListener stops the listening for all who have the socket: the client may keep a
// descriptor of it. No accept may be under way.
func closeListener(l *net.TCPListener) {
	_ = peer.Control(l, func(fd int) error {
		peer.Reset(fd) // the client may have made a connection of it
		return unix.Shutdown(fd, unix.SHUT_RDWR)
	})
	_ = l.Close()
}

// stopAccepting ends an accept, until served is closed. The client can have it block, as it
// can make the socket blocking at any time, and can listen again after each shutdown. The
// container is charged for the lease meanwhile.
func stopAccepting(l *net.TCPListener, served <-chan struct{}) {
	_ = l.SetDeadline(time.Unix(1, 0))
	pause := schedule.Backoff{Min: time.Millisecond, Max: 100 * time.Millisecond}
	for {
		_ = peer.Control(l, func(fd int) error {
			return errors.Join(unix.SetNonblock(fd, true), unix.Shutdown(fd, unix.SHUT_RDWR))
		})
		select {
		case <-served:
			return
		case <-time.After(pause.Next()):
		}
	}
}

// passed is a connection that a client made and passed. Its flags are shared with the
// client, so no call may block if the client makes the socket blocking.
type passed struct {
	*net.TCPConn
	raw     syscall.RawConn
	linger  atomic.Int32 // as SetLinger set it last
	release func()       // called after it was closed
}

// SetLinger sets what happens at Close.
func (c *passed) SetLinger(sec int) error {
	c.linger.Store(int32(sec))
	return c.TCPConn.SetLinger(sec)
}

// newPassed makes a connection of a descriptor, which it owns.
func newPassed(fd int) (*passed, error) {
	peer.Reset(fd)
	f := fileOf(fd)
	defer func() { _ = f.Close() }()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, peer.Refuse(peer.ReasonDescriptor, "the descriptor is no connected TCP socket")
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok || tcp.RemoteAddr() == nil {
		_ = c.Close()
		return nil, peer.Refuse(peer.ReasonDescriptor, "the descriptor is no connected TCP socket")
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return &passed{TCPConn: tcp, raw: raw, release: func() {}}, nil
}

// Read implements net.Conn.
func (c *passed) Read(b []byte) (n int, err error) {
	if len(b) == 0 {
		return 0, nil
	}
	cerr := c.raw.Read(func(fd uintptr) bool {
		n, _, err = unix.Recvfrom(int(fd), b, unix.MSG_DONTWAIT) // which no signal interrupts
		return err != unix.EAGAIN
	})
	switch {
	case cerr != nil:
		return 0, cerr
	case err != nil:
		return 0, os.NewSyscallError("recvfrom", err)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// Write implements net.Conn.
func (c *passed) Write(b []byte) (sent int, err error) {
	cerr := c.raw.Write(func(fd uintptr) bool {
		for err = nil; sent < len(b) && err == nil; {
			var n int
			n, err = unix.SendmsgN(int(fd), b[sent:], nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			sent += max(n, 0)
		}
		return err != unix.EAGAIN
	})
	if cerr != nil {
		return sent, cerr
	}
	return sent, os.NewSyscallError("sendmsg", err)
}

// Close implements net.Conn.
func (c *passed) Close() error {
	_ = c.TCPConn.SetLinger(int(c.linger.Load())) // the client may have changed it
	err := c.TCPConn.Close()
	c.release()
	return err
}

// namespaceOf returns the network namespace of a socket, by SIOCGSKNS, which needs
// CAP_NET_ADMIN.
func namespaceOf(fd int) (peer.Namespace, error) {
	ns, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
	if err != nil {
		return peer.Namespace{}, peer.Refuse(peer.ReasonNamespace, "cannot read the socket's network namespace: %v", err)
	}
	defer func() { _ = unix.Close(ns) }()
	var st unix.Stat_t
	if err := unix.Fstat(ns, &st); err != nil {
		return peer.Namespace{}, peer.Refuse(peer.ReasonNamespace, "cannot read the socket's network namespace: %v", err)
	}
	return peer.NamespaceOf(&st), nil
}

// checkSocket refuses what is not a TCP socket of the client's own network namespace that
// listens, or does not.
func (l *lease) checkSocket(fd int, listens bool) error {
	options := []struct {
		option int
		want   []int
	}{
		{unix.SO_DOMAIN, []int{unix.AF_INET, unix.AF_INET6}},
		{unix.SO_TYPE, []int{unix.SOCK_STREAM}},
		{unix.SO_PROTOCOL, []int{unix.IPPROTO_TCP, unix.IPPROTO_MPTCP}},
		{unix.SO_ACCEPTCONN, []int{btoi(listens)}},
	}
	for _, o := range options {
		v, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, o.option)
		if err != nil || v != o.want[0] && v != o.want[len(o.want)-1] {
			return peer.Refuse(peer.ReasonDescriptor, "the descriptor is no %s TCP socket", state(listens))
		}
	}
	if l.network == l.s.network {
		return peer.Refuse(peer.ReasonNamespace, "the container has the guest's own network: it needs no help")
	}
	ns, err := namespaceOf(fd)
	if err != nil {
		return err
	}
	if ns != l.network {
		return peer.Refuse(peer.ReasonNamespace, "the socket is in another network namespace than its sender")
	}
	return nil
}

func state(listens bool) string {
	if listens {
		return "listening"
	}
	return "connected"
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}
