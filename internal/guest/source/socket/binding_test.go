// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/netwatch"

	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
)

func TestUDPAddressThatCannotAnswerIsWithheld(t *testing.T) {
	m := newMachine(t, "0::/\n")
	h, _ := m.handler(0)
	multicast, broadcast := port.Because(port.MulticastAddress), port.Because(port.BroadcastAddress)
	for _, c := range []struct {
		protocol port.Protocol
		address  string
		want     port.Reason
	}{
		{port.UDP, "224.0.0.251", multicast},
		{port.UDP, "ff02::fb", multicast},
		{port.UDP, "10.0.0.255", broadcast},
		{port.UDP, "10.0.0.1", port.Reason{}},
		{port.UDP, "127.0.0.1", port.Reason{}},
		{port.UDP, "0.0.0.0", port.Reason{}},
		{port.UDP, "fd00::1", port.Reason{}},
	} {
		b := h.binding(&observer.Socket{
			Cookie: 1, Protocol: c.protocol, Address: netip.MustParseAddr(c.address), Port: 5353, Listening: true,
		})
		if b.Withheld != c.want || (len(b.Dial) == 0) == c.want.IsZero() {
			t.Errorf("%v %s: withheld %q, dialled at %v; want %q", c.protocol, c.address, b.Withheld, b.Dial, c.want)
		}
	}
}

// fakeNetwork has lo, eth0 and eth2, which is down.
func fakeNetwork() network {
	devices := map[uint32]device{
		lo:     {name: "lo", addresses: parsed("127.0.0.1", "::1", "10.5.5.5")},
		eth0:   {name: "eth0", addresses: parsed("fe80::1", "10.0.0.1", "10.0.0.9", "fd00::1")},
		bare:   {name: "eth1", addresses: parsed("fe80::2")},
		downed: {name: "eth2", addresses: parsed("10.0.2.1"), down: true},
	}
	return network{
		only4:  func() bool { return false },
		device: func(index uint32) device { return devices[index] },
		kind: func(a netip.Addr) netwatch.Kind {
			switch {
			case a == netip.MustParseAddr("10.0.0.255"):
				return netwatch.Broadcast
			case slices.Contains(slices.Concat(devices[lo].addresses, devices[eth0].addresses, devices[downed].addresses), a):
				return netwatch.Own
			}
			return netwatch.Elsewhere
		},
	}
}

const lo, eth0, bare, none, downed = 1, 2, 3, 4, 5

func parsed(texts ...string) (list []netip.Addr) {
	for _, text := range texts {
		list = append(list, netip.MustParseAddr(text))
	}
	return list
}

// TestSocketIsReachedWhereTheKernelDelivers: a socket of an interface is reached at
// the interface's addresses, one of an address that the machine does not have nowhere.
func TestSocketIsReachedWhereTheKernelDelivers(t *testing.T) {
	m := newMachine(t, "0::/\n")
	h, _ := m.handler(0)
	h.network.stands = netip.MustParsePrefix("127.102.0.0/16")
	for _, c := range []struct {
		device  uint32
		address string
		v6only  bool
		want    string // where it is dialled, or why it is withheld
	}{
		{eth0, "10.0.0.1", false, "[10.0.0.1:80]"},
		{eth0, "10.0.0.2", false, "bound to interface eth0, which does not have the address"},
		{eth0, "0.0.0.0", false, "[10.0.0.1:80 10.0.0.9:80]"},
		{eth0, "::", false, "[[fd00::1]:80] and [10.0.0.1:80 10.0.0.9:80]"},
		{eth0, "::", true, "[[fd00::1]:80]"},
		{eth0, "127.0.0.1", false, "bound to interface eth0, which does not have the address"},
		{eth0, "::1", false, "bound to interface eth0, which does not have the address"},
		{eth0, "fe80::1", false, "[[fe80::1%eth0]:80]"},
		{eth0, "fe80::7", false, "bound to interface eth0, which does not have the address"},
		{bare, "0.0.0.0", false, "bound to interface eth1, which has no address"},
		{bare, "::", false, "[[fe80::2%eth1]:80] and bound to interface eth1, which has no address"},
		{none, "::", true, "bound to interface , which has no address"},
		{0, "::", false, "[[::1]:80] and [127.0.0.1:80]"},
		{downed, "10.0.2.1", false, "bound to interface eth2, which is down"},
		{downed, "0.0.0.0", false, "bound to interface eth2, which is down"},
		{downed, "::", false, "bound to interface eth2, which is down and bound to interface eth2, which is down"},
		{0, "10.0.2.1", false, "[10.0.2.1:80]"}, // the kernel answers at it all the same
		{lo, "10.0.0.1", false, "bound to interface lo, which does not have the address"},
		{lo, "10.5.5.5", false, "[10.5.5.5:80]"},
		{lo, "0.0.0.0", false, "[127.0.0.1:80]"},
		{lo, "::", false, "[[::1]:80] and [127.0.0.1:80]"},
		{lo, "127.0.0.2", false, "[127.0.0.2:80]"},
		{0, "127.102.7.7", false, "at an address that stands for containers which publish on request: no server of the guest is dialled there"},
		{lo, "127.102.7.7", false, "at an address that stands for containers which publish on request: no server of the guest is dialled there"},
		{0, "127.103.7.7", false, "[127.103.7.7:80]"},
		{0, "0.0.0.0", false, "[127.0.0.1:80]"},
		{0, "::", true, "[[::1]:80]"},
		{0, "10.0.0.1", false, "[10.0.0.1:80]"},
		{0, "10.0.0.77", false, "bound to an address that no interface has"},
		{0, "fd00::77", false, "bound to an address that no interface has"},
		{0, "10.0.0.255", false, "bound to a broadcast address: no answer can come from there"},
	} {
		var got []string
		for _, b := range h.bindings(nil, &observer.Socket{
			Cookie: 1, Protocol: port.TCP, Address: netip.MustParseAddr(c.address), Port: 80, V6Only: c.v6only, Listening: true, Device: c.device,
		}) {
			text := b.Withheld.String()
			if text == "" {
				text = fmt.Sprint(b.Dial)
			}
			got = append(got, text)
			if b.Withheld.IsZero() != (len(b.Dial) > 0) {
				t.Errorf("device %d, %s: withheld %q, and dialled at %v", c.device, c.address, b.Withheld, b.Dial)
			}
		}
		if text := strings.Join(got, " and "); text != c.want {
			t.Errorf("device %d, %s: %s, want %s", c.device, c.address, text, c.want)
		}
	}
}

// TestAddressesThatChangeMoveSockets: sockets that depend on addresses are fed again
// when these change, and no others.
func TestAddressesThatChangeMoveSockets(t *testing.T) {
	m := newMachine(t, "0::/\n")
	h, _ := m.handler(0)
	followed := 0
	h.follow = func() { followed++ }
	sockets := []observer.Event{
		{Socket: observer.Socket{Cookie: 1, Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 81, Listening: true, Device: eth0}},
		{Socket: observer.Socket{Cookie: 2, Protocol: port.UDP, Address: netip.MustParseAddr("10.0.0.1"), Port: 82, Listening: true}},
		{Socket: observer.Socket{Cookie: 3, Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.1"), Port: 83, Listening: true}},
		{Socket: observer.Socket{Cookie: 4, Protocol: port.TCP, Address: netip.MustParseAddr("10.0.0.1"), Port: 84, Listening: true, Device: eth0}},
	}
	h.Apply(sockets[2:3])
	if followed != 0 {
		t.Error("a socket of the loopback follows the network")
	}
	h.Apply(sockets)
	h.Apply([]observer.Event{{Gone: true, Socket: sockets[3].Socket}})
	if followed == 0 {
		t.Error("nothing follows the network")
	}
	f := new(lastFed)
	h.feed = f
	h.recheck()
	if f.last != nil {
		t.Errorf("fed again though nothing has changed: %v", f.last)
	}
	h.network.kind = func(netip.Addr) netwatch.Kind { return netwatch.Elsewhere }
	for _, step := range []struct {
		now  device
		want []string
	}{
		{device{name: "eth0", addresses: parsed("10.0.0.9")}, []string{"81 [10.0.0.9:81] ", "82 [] bound to an address that no interface has"}},
		{device{name: "eth0", addresses: parsed("10.0.0.9"), down: true}, []string{"81 [] bound to interface eth0, which is down"}},
		{device{name: "eth0", addresses: parsed("10.0.0.9")}, []string{"81 [10.0.0.9:81] "}},
	} {
		h.network.device = func(uint32) device { return step.now }
		h.recheck()
		slices.Sort(f.last)
		if !slices.Equal(f.last, step.want) {
			t.Errorf("fed %q, want %q", f.last, step.want)
		}
	}
}

// A server at :: has no client over IPv6 where no interface has an address of it: its IPv4 half
// is as everywhere, and the other is fed when an address comes, and when it goes.
func TestWithoutIPv6OnlyIPv4IsServed(t *testing.T) {
	h, _ := newMachine(t, "0::/\n").handler(0)
	only4, followed := true, false
	h.network.only4, h.follow = func() bool { return only4 }, func() { followed = true }
	f := new(lastFed)
	h.feed = f
	h.Replace(nil)
	s := observer.Socket{Cookie: 1, Protocol: port.TCP, Address: netip.IPv6Unspecified(), Port: 80, Listening: true}
	want := func(texts ...string) {
		t.Helper()
		if !slices.Equal(f.last, texts) {
			t.Errorf("fed %q, want %q", f.last, texts)
		}
	}
	h.Apply([]observer.Event{{Socket: s}})
	want("80 [] bound to an address that no interface has", "80 [127.0.0.1:80] ")
	if !followed {
		t.Error("nothing follows the network")
	}
	for range 2 {
		only4 = false
		h.recheck()
		want("80 [[::1]:80] ", "80 [127.0.0.1:80] ")
		only4 = true
		h.recheck()
		want("80 [] bound to an address that no interface has", "80 [127.0.0.1:80] ")
	}
}

// A server at :: that was there when there was IPv6 is judged as a new one when there is none.
func TestWithoutIPv6AServerOfBeforeIsJudgedAnew(t *testing.T) {
	h, _ := newMachine(t, "0::/\n").handler(0)
	only4, followed := false, false
	h.network.only4, h.follow = func() bool { return only4 }, func() { followed = true }
	f := new(lastFed)
	h.feed = f
	h.Replace([]observer.Socket{{Cookie: 1, Protocol: port.TCP, Address: netip.IPv6Unspecified(), Port: 80, Listening: true}})
	if !followed {
		t.Error("nothing follows the network")
	}
	only4 = true
	h.recheck()
	if want := []string{"80 [] bound to an address that no interface has", "80 [127.0.0.1:80] "}; !slices.Equal(f.last, want) {
		t.Errorf("fed %q, want %q", f.last, want)
	}
}

// lastFed is a feed that keeps what was last put.
type lastFed struct {
	tally
	last []string
}

func (f *lastFed) Apply(c port.Change) {
	f.last = nil
	for _, b := range c.Put {
		f.last = append(f.last, fmt.Sprint(b.Port, b.Dial, " ", b.Withheld))
	}
}
