// SPDX-License-Identifier: Apache-2.0

package own

import (
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func rawCookie(t *testing.T, c any) uint64 {
	t.Helper()
	sc, ok := c.(syscall.Conn)
	if !ok {
		t.Fatalf("%T is no syscall.Conn", c)
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	cookie, err := cookieOf(rc)
	if err != nil {
		t.Fatal(err)
	}
	return cookie
}

func TestCookieLifetime(t *testing.T) {
	var s Sockets
	lc := s.ListenConfig()
	known := false
	inner := lc.Control
	lc.Control = func(network, address string, c syscall.RawConn) error {
		if err := inner(network, address, c); err != nil {
			return err
		}
		cookie, err := cookieOf(c)
		known = err == nil && s.Has(cookie)
		return err
	}
	ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if !known {
		t.Error("the cookie was not in the set before bind")
	}
	if !s.Has(rawCookie(t, ln)) {
		t.Error("the cookie of the listener is not in the set")
	}

	own, err := s.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cookie := rawCookie(t, own)
	if !s.Has(cookie) {
		t.Error("Listen: cookie not in the set")
	}
	if err := own.Close(); err != nil {
		t.Fatal(err)
	}
	if !s.Has(cookie) {
		t.Error("Listen: not ours after close, when its events may still be read")
	}

	pc, err := s.ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cookie = rawCookie(t, pc)
	if !s.Has(cookie) {
		t.Error("ListenPacket: cookie not in the set")
	}
	if err := pc.Close(); err != nil {
		t.Fatal(err)
	}
	if !s.Has(cookie) {
		t.Error("ListenPacket: not ours after close, when its events may still be read")
	}
}

// Sockets that could not be bound, and closed ones, are ours until their events are read.
// What is kept of them is bounded.
func TestClosedSocketsAreOurs(t *testing.T) {
	var s Sockets
	ln, err := s.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	pc, err := s.ListenPacket(t.Context(), "udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	for what, listen := range map[string]func() error{
		"Listen":          func() error { _, err := s.Listen(t.Context(), "tcp4", ln.Addr().String()); return err },
		"ListenExclusive": func() error { _, err := s.ListenExclusive(t.Context(), "tcp4", ln.Addr().String()); return err },
		"ListenPacket":    func() error { _, err := s.ListenPacket(t.Context(), "udp4", pc.LocalAddr().String()); return err },
	} {
		before := len(s.cookies)
		if err := listen(); err == nil {
			t.Fatalf("%s: two sockets at one address", what)
		}
		if len(s.cookies) != before+1 {
			t.Errorf("%s: the socket that was refused is not ours", what)
		}
	}
	for c := range uint64(2 * maxClosed) {
		s.add(1<<40 + c)
		s.forget([]uint64{1<<40 + c}, nil)
		if !s.Has(1<<40 + c) {
			t.Fatal("not ours when it is closed")
		}
	}
	if n := len(s.cookies); n != maxClosed+2 {
		t.Errorf("%d cookies, want those of 2 open sockets and of %d closed ones", n, maxClosed)
	}
	if !s.Has(rawCookie(t, ln)) || !s.Has(rawCookie(t, pc)) {
		t.Error("an open socket is not ours")
	}
}

// The sockets of another fairlead are ours when they are adopted.
func TestAdoptedSocketsAreOurs(t *testing.T) {
	var other, s Sockets
	ln, err := other.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if s.Adopt(other.Cookies()); !s.Has(rawCookie(t, ln)) {
		t.Error("not ours")
	}
}

func TestNoForeignCookie(t *testing.T) {
	var s Sockets
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if s.Has(rawCookie(t, ln)) {
		t.Error("a foreign socket is in the set")
	}
}

func TestNotMPTCP(t *testing.T) {
	var s Sockets
	ln, err := s.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	rc, err := ln.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var protocol int
	if cerr := rc.Control(func(fd uintptr) {
		protocol, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL)
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	if protocol != unix.IPPROTO_TCP {
		t.Errorf("protocol = %d, want %d", protocol, unix.IPPROTO_TCP)
	}
}
