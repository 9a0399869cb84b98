// SPDX-License-Identifier: Apache-2.0

package own

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// boundOnly returns a socket that asks to reuse its address, and its port.
func boundOnly(t *testing.T) (fd, p int) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	sa, nerr := unix.Getsockname(fd)
	if err = errors.Join(err, nerr); err != nil {
		t.Fatal(err)
	}
	return fd, sa.(*unix.SockaddrInet4).Port
}

// A plain listener would take the port from a socket that is bound to listen later.
func TestListenExclusiveOnBoundPort(t *testing.T) {
	var s Sockets
	fd, p := boundOnly(t)
	addr := fmt.Sprintf("127.0.0.1:%d", p)
	if ln, err := s.ListenExclusive(t.Context(), "tcp4", addr); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("ListenExclusive = %v, %v; want EADDRINUSE", ln, err)
	}
	if err := unix.Listen(fd, 1); err != nil {
		t.Errorf("the owner cannot listen: %v", err)
	}
}

// A server that asks to reuse the address has the port as soon as it is given up,
// whatever connections are left.
func TestListenAfterExclusive(t *testing.T) {
	var s Sockets
	ln, err := s.ListenExclusive(t.Context(), "tcp4", fmt.Sprintf("127.0.0.1:%d", ports.Free(t)))
	if err != nil {
		t.Fatal(err)
	}
	if !s.Has(rawCookie(t, ln)) {
		t.Error("its cookie is not in the set")
	}
	client, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := s.ListenExclusive(t.Context(), "tcp4", ln.Addr().String()); err == nil {
		t.Error("exclusive although a connection is left")
		_ = got.Close()
	}
	server, err := net.Listen("tcp4", ln.Addr().String())
	if err != nil {
		t.Fatalf("a server that reuses the address: %v", err)
	}
	defer server.Close()
	if _, err := io.WriteString(client, "x"); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Errorf("the connection that was left: %v", err)
	}
}

// Another program, also one that asks to reuse address and port, gets no address of a port
// that is open at the wildcard: it would receive what was meant for us.
func TestNarrowerAddressIsRefused(t *testing.T) {
	var s Sockets
	ln, err := s.Listen(t.Context(), "tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	pc, err := s.ListenPacket(t.Context(), "udp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	for kind, addr := range map[int]net.Addr{unix.SOCK_STREAM: ln.Addr(), unix.SOCK_DGRAM: pc.LocalAddr()} {
		fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
		if err != nil {
			t.Fatal(err)
		}
		to := &unix.SockaddrInet4{Port: int(netip.MustParseAddrPort(addr.String()).Port()), Addr: [4]byte{127, 0, 0, 1}}
		if err := unix.Bind(fd, to); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("%s: bind to 127.0.0.1: %v, want EADDRINUSE", addr.Network(), err)
		}
		_ = unix.Close(fd)
	}
}
