// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/port"
)

func TestUDPAddressThatCannotAnswerIsWithheld(t *testing.T) {
	m := newMachine(t, "0::/\n")
	h, _ := m.handler(0)
	const multicast, broadcast = "bound to a multicast address: no answer can come from there", "bound to a broadcast address: no answer can come from there"
	for _, c := range []struct {
		protocol port.Protocol
		address  string
		want     string
	}{
		{port.UDP, "224.0.0.251", multicast},
		{port.UDP, "ff02::fb", multicast},
		{port.UDP, "10.0.0.255", broadcast},
		{port.UDP, "10.0.0.1", ""},
		{port.UDP, "127.0.0.1", ""},
		{port.UDP, "0.0.0.0", ""},
		{port.UDP, "fd00::1", ""},
		{port.TCP, "10.0.0.255", ""},
	} {
		b := h.binding(&observer.Socket{
			Cookie: 1, Protocol: c.protocol, Address: netip.MustParseAddr(c.address), Port: 5353, Listening: true,
		})
		if b.Withheld != c.want || (len(b.Dial) == 0) != (c.want != "") {
			t.Errorf("%v %s: withheld %q, dialled at %v; want %q", c.protocol, c.address, b.Withheld, b.Dial, c.want)
		}
	}
}

func TestIsBroadcast(t *testing.T) {
	for text, want := range map[string]bool{"127.255.255.255": true, "255.255.255.255": true, "127.0.0.2": false} {
		if got := isBroadcast(netip.MustParseAddr(text)); got != want {
			t.Errorf("isBroadcast(%s) = %v", text, got)
		}
	}
}

func TestSocketOfAnInterface(t *testing.T) {
	m := newMachine(t, "0::/\n")
	h, _ := m.handler(0)
	const lo, eth0 = 1, 2
	for _, c := range []struct {
		device  uint32
		address string
		want    bool // the guest itself reaches it
	}{
		{eth0, "10.0.0.1", true}, // its own address
		{eth0, "10.0.0.2", false},
		{eth0, "0.0.0.0", false},
		{eth0, "127.0.0.1", false},
		{eth0, "::1", false},
		{lo, "10.0.0.1", false}, // an address of eth0
		{lo, "0.0.0.0", true},
		{lo, "127.0.0.2", true},
	} {
		b := h.binding(&observer.Socket{
			Cookie: 1, Protocol: port.TCP, Address: netip.MustParseAddr(c.address), Port: 80, Listening: true, Device: c.device,
		})
		if (b.Withheld == "") != c.want || (len(b.Dial) == 1) != c.want {
			t.Errorf("device %d, %s: withheld %q, dialled at %v", c.device, c.address, b.Withheld, b.Dial)
		}
	}
}
