// SPDX-License-Identifier: Apache-2.0

package host

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// listenUDP returns a socket that is not connected.
func listenUDP(t *testing.T) *net.UDPConn {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// A client whose socket is connected takes an answer only from the address that it sent to,
// which the kernel would not choose at a port that is open at all addresses.
func TestUDPAnswerComesFromWhereItWasSent(t *testing.T) {
	eachWay(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		k := key(port.UDP, any4, ports.Free(t))
		a.echo(k, "")
		a.begins(snapshot(1, pub(k, at(any4, k.Port))))
		h, _ := start(t, Options{Policy: exposeAll(t)}, a)
		a.wants(k, port.Active)
		for _, to := range []string{"127.0.0.2", "127.0.0.1", "127.8.8.8"} {
			c := dialUDP(t, at(netip.MustParseAddr(to), k.Port))
			for _, s := range []string{"x", "y"} {
				if got := question(t, c, s); got != s {
					t.Errorf("%s answers %q", to, got)
				}
			}
		}
		if n := h.Stats().OpenUDP; n != 3 {
			t.Errorf("%d flows, want one for each client", n)
		}
	})
}

// One socket that sends to two addresses of a port has the answers of each.
func TestUDPClientOfTwoAddresses(t *testing.T) {
	eachWay(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		k := key(port.UDP, any4, ports.Free(t))
		a.echo(k, "")
		a.begins(snapshot(1, pub(k, at(any4, k.Port))))
		start(t, Options{Policy: exposeAll(t)}, a)
		a.wants(k, port.Active)
		c := listenUDP(t)
		for range 2 {
			for _, to := range []string{"127.0.0.2", "127.0.0.3"} {
				want := at(netip.MustParseAddr(to), k.Port)
				if _, err := c.WriteToUDPAddrPort([]byte(to), want); err != nil {
					t.Fatal(err)
				}
				b := make([]byte, 64)
				n, from, err := c.ReadFromUDPAddrPort(b)
				if err != nil || from != want || string(b[:n]) != to {
					t.Errorf("%s answers %q from %s, %v", to, b[:n], from, err)
				}
			}
		}
	})
}
