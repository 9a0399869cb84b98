// SPDX-License-Identifier: Apache-2.0

package own_test

import (
	"net"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/own"
	"github.com/fairlead/fairlead/internal/port"
)

func addrPort(t *testing.T, a net.Addr) netip.AddrPort {
	t.Helper()
	switch a := a.(type) {
	case *net.TCPAddr:
		return a.AddrPort()
	case *net.UDPAddr:
		return a.AddrPort()
	}
	t.Fatalf("address %v has no port", a)
	return netip.AddrPort{}
}

func TestServesUntilClosed(t *testing.T) {
	for _, tc := range []struct {
		protocol         port.Protocol
		network, address string
		also, not        string // addresses on the same port
	}{
		{port.TCP, "tcp4", "127.0.0.1:0", "::ffff:127.0.0.1", "127.0.0.2"},
		{port.TCP, "tcp4", "0.0.0.0:0", "10.1.2.3", "::1"},
		{port.TCP, "tcp6", "[::1]:0", "::1", "127.0.0.1"},
		{port.UDP, "udp4", "127.0.0.1:0", "127.0.0.1", "127.0.0.2"},
		{port.UDP, "udp4", "0.0.0.0:0", "10.1.2.3", "::1"},
	} {
		t.Run(tc.network+" "+tc.address, func(t *testing.T) {
			var s own.Sockets
			var closer interface{ Close() error }
			var local netip.AddrPort
			if tc.protocol == port.TCP {
				ln, err := s.Listen(t.Context(), tc.network, tc.address)
				if err != nil {
					t.Fatal(err)
				}
				closer, local = ln, addrPort(t, ln.Addr())
			} else {
				pc, err := s.ListenPacket(t.Context(), tc.network, tc.address)
				if err != nil {
					t.Fatal(err)
				}
				closer, local = pc, addrPort(t, pc.LocalAddr())
			}
			at := func(ip string) netip.AddrPort {
				return netip.AddrPortFrom(netip.MustParseAddr(ip), local.Port())
			}
			other := port.TCP + port.UDP - tc.protocol
			for _, c := range []struct {
				protocol port.Protocol
				addr     netip.AddrPort
				want     bool
			}{
				{tc.protocol, local, true},
				{tc.protocol, at(tc.also), true},
				{tc.protocol, at(tc.not), false},
				{other, local, false},
			} {
				if got := s.Serves(c.protocol, c.addr); got != c.want {
					t.Errorf("Serves(%v, %v) = %v, want %v", c.protocol, c.addr, got, c.want)
				}
			}
			if err := closer.Close(); err != nil {
				t.Fatal(err)
			}
			if s.Serves(tc.protocol, local) {
				t.Error("serves after close")
			}
			if err := closer.Close(); err == nil {
				t.Error("the second close gave no error")
			}
		})
	}
}

func TestServesTwoOfOneAddress(t *testing.T) {
	var s own.Sockets
	a, err := s.Listen(t.Context(), "tcp", "[::]:0")
	if err != nil {
		t.Fatal(err)
	}
	local := addrPort(t, a.Addr())
	v4 := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), local.Port())
	if !s.Serves(port.TCP, v4) {
		t.Error("a dual-stack listener does not count for IPv4")
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if s.Serves(port.TCP, v4) {
		t.Error("serves after close")
	}
}

func TestListenError(t *testing.T) {
	var s own.Sockets
	a, err := s.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if ln, err := s.Listen(t.Context(), "tcp4", a.Addr().String()); err == nil {
		ln.Close()
		t.Fatal("two listeners on one port")
	}
	if !s.Serves(port.TCP, addrPort(t, a.Addr())) {
		t.Error("a failed listen took the first out of the set")
	}
}
