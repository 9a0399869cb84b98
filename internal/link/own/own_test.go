// SPDX-License-Identifier: Apache-2.0

package own_test

import (
	"net"
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/link/own"
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
		{port.TCP, "tcp", "[::]:0", "127.0.0.1", ""}, // a dual-stack listener
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
			if !s.Serves(tc.protocol, local) || !s.Serves(tc.protocol, at(tc.also)) || s.Serves(other, local) {
				t.Errorf("serves %v %t, at %s %t, %v %t", local, s.Serves(tc.protocol, local), tc.also, s.Serves(tc.protocol, at(tc.also)), other, s.Serves(other, local))
			}
			if tc.not != "" && s.Serves(tc.protocol, at(tc.not)) {
				t.Errorf("serves %s", tc.not)
			}
			if err := closer.Close(); err != nil {
				t.Fatal(err)
			}
			if s.Serves(tc.protocol, local) || s.Serves(tc.protocol, at(tc.also)) {
				t.Error("serves after close")
			}
			if err := closer.Close(); err == nil {
				t.Error("the second close gave no error")
			}
		})
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
