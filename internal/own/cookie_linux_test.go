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
	if s.Has(cookie) {
		t.Error("Listen: cookie in the set after close")
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
	if s.Has(cookie) {
		t.Error("ListenPacket: cookie in the set after close")
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
