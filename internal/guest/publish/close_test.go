// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// lingering returns a connection that blocks close(2) for an hour: its peer reads nothing,
// and the buffers are full. The peer resets it when the test ends.
func lingering(t *testing.T) (fd int) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	fd, err = connectedTo(l.Addr().(*net.TCPAddr).Port)
	if err != nil {
		t.Fatal(err)
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = c.(*net.TCPConn).SetLinger(0)
	t.Cleanup(func() { _ = c.Close() })
	if err := fill(fd); err != nil {
		t.Fatal(err)
	}
	return fd
}

// However a client passes connections that block close(2), they are closed at once.
func TestLingeringConnections(t *testing.T) {
	for _, c := range []struct {
		name  string
		text  string
		fds   int
		close func(conn *net.UnixConn)
	}{
		{"in a message that is read", "{}", 1, read},
		{"several", "{}", 5, read},
		{"malformed", "{", 1, read},
		{"an empty message", "", 1, read},
		{"unread", "{}", 1, peer.CloseClient},
		{"several unread", "{", 5, peer.CloseClient},
		{"unread and empty", "", 1, peer.CloseClient},
		{"not a listener", "{}", 1, func(conn *net.UnixConn) { taken(t, conn, func(fd int) { _, _ = listenerOf(fd) }) }},
		{"as a connection", "{}", 1, func(conn *net.UnixConn) {
			taken(t, conn, func(fd int) {
				c, err := newPassed(fd)
				if err != nil {
					t.Error(err)
					return
				}
				_ = peer.Control(c.TCPConn, func(fd int) error { return linger(fd) }) // as the client can
				_ = c.Close()
			})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := packets(t)
			if err := passcred(b); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				var fds []int
				for range c.fds {
					fds = append(fds, lingering(t))
				}
				err := sendRaw(a, c.text, unix.UnixRights(fds...))
				for _, fd := range fds { // these are not the last ones
					_ = unix.Close(fd)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			closed := make(chan struct{})
			go func() {
				defer close(closed)
				c.close(b)
				peer.CloseClient(b)
			}()
			wait.For(t, "all are closed", closed)
		})
	}
}

// CloseClient closes unread connections, but does not wait for more.
func TestCloseClientOfNothing(t *testing.T) {
	a, b := packets(t)
	peer.CloseClient(b)
	if _, err := a.Write([]byte("x")); err == nil {
		t.Error("a message was sent to a closed connection")
	}
	_, c := packets(t)
	_ = c.CloseRead()
	peer.CloseClient(c)
}

func passcred(c *net.UnixConn) error {
	return peer.Control(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
}

func read(conn *net.UnixConn) {
	var q request
	p, _ := peer.Receive(conn, &q)
	p.Close()
}

func taken(t *testing.T, conn *net.UnixConn, use func(fd int)) {
	var q request
	p, err := peer.Receive(conn, &q)
	if err != nil {
		t.Error(err)
		return
	}
	fd, _ := p.Take()
	use(fd)
}

// A connection in a message to a unix socket that is passed itself is closed with it.
func TestNestedLingeringConnections(t *testing.T) {
	for _, c := range []struct {
		name string
		kind int
		in   func(t *testing.T, kind, fd int) int
	}{
		{"to a stream", unix.SOCK_STREAM, inPair},
		{"to a stream whose peer did not read all", unix.SOCK_STREAM, inHalfRead},
		{"in a packet of a peer that did not read all", unix.SOCK_SEQPACKET, inHalfRead},
		{"to a datagram socket", unix.SOCK_DGRAM, inPair},
		{"in an empty packet", unix.SOCK_SEQPACKET, inPair},
		{"in a connection that was not accepted", unix.SOCK_STREAM, inListener},
		{"in a packet of a connection that was not accepted", unix.SOCK_SEQPACKET, inListener},
	} {
		for when, end := range map[string]func(*net.UnixConn){"read": read, "unread": peer.CloseClient} {
			t.Run(c.name+", "+when, func(t *testing.T) {
				a, b := packets(t)
				if err := passcred(b); err != nil {
					t.Fatal(err)
				}
				fd := c.in(t, c.kind, c.in(t, c.kind, lingering(t)))
				err := sendRaw(a, "{}", unix.UnixRights(fd))
				_ = unix.Close(fd)
				if err != nil {
					t.Fatal(err)
				}
				closed := make(chan struct{})
				go func() {
					defer close(closed)
					end(b)
					peer.CloseClient(b)
				}()
				wait.For(t, "all are closed", closed)
			})
		}
	}
}

// What clients sent that were not accepted does not hold up the end of the agent.
func TestCloseListenerWithLingeringClients(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "s")
	l, err := link.ListenPackets(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		conn, err := peer.Connect(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fd := lingering(t)
		err = peer.Send(conn, request{}, fd)
		_ = unix.Close(fd) // not the last one
		if err != nil {
			t.Fatal(err)
		}
	}
	closed := make(chan error, 1)
	go func() { closed <- peer.CloseListener(l) }()
	if err := wait.For(t, "it is closed", closed); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

// inPair returns a socket that was sent a descriptor, which it owns, and has not read it.
func inPair(t *testing.T, kind, fd int) int {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	sendInto(t, fds[1], kind, fd)
	return fds[0]
}

// inHalfRead is inPair, with a peer that was closed before it read all.
func inHalfRead(t *testing.T, kind, fd int) int {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_, err = unix.Write(fds[0], []byte("x"))
	}
	if err != nil {
		t.Fatal(err)
	}
	sendInto(t, fds[1], kind, fd)
	return fds[0]
}

// inListener is inPair, with a listener whose client sent the descriptor.
func inListener(t *testing.T, kind, fd int) int {
	t.Helper()
	l, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	c, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	at := &unix.SockaddrUnix{Name: filepath.Join(t.TempDir(), "s")}
	if err := errors.Join(unix.Bind(l, at), unix.Listen(l, 1), unix.Connect(c, at)); err != nil {
		t.Fatal(err)
	}
	sendInto(t, c, kind, fd)
	return l
}

// sendInto sends a descriptor, and closes both.
func sendInto(t *testing.T, to, kind, fd int) {
	t.Helper()
	text := []byte("x")
	if kind == unix.SOCK_SEQPACKET {
		text = nil
	}
	if err := unix.Sendmsg(to, text, unix.UnixRights(fd), nil, 0); err != nil {
		t.Fatal(err)
	}
	_, _ = unix.Close(fd), unix.Close(to)
}
