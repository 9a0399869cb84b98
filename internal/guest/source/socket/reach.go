// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
)

// network answers questions about interfaces and addresses as they are now.
type network struct {
	device func(index uint32) device
	kind   func(netip.Addr) netwatch.Kind // of an address that is not of the loopback
	only4  func() bool                    // no interface has an address of IPv6
	stands netip.Prefix                   // see Options

	is4 bool // what only4 returned last: a server at :: has no client over IPv6
}

// device is an interface.
type device struct {
	name      string // or else the number, which is a zone as well
	down      bool
	addresses []netip.Addr // without zones
}

func ownNetwork(stands netip.Prefix) network {
	return network{device: ownDevice, kind: addressKind, only4: onlyIPv4, stands: stands}
}

// onlyIPv4 is false where the kernel cannot be asked.
func onlyIPv4() bool {
	list, err := net.InterfaceAddrs()
	return err == nil && !slices.ContainsFunc(list, func(a net.Addr) bool {
		p, err := netip.ParsePrefix(a.String())
		return err == nil && p.Addr().Is6()
	})
}

func ownDevice(index uint32) device {
	i, err := net.InterfaceByIndex(int(index))
	if err != nil {
		return device{name: strconv.FormatUint(uint64(index), 10)}
	}
	d := device{name: i.Name, down: i.Flags&net.FlagUp == 0}
	list, _ := i.Addrs()
	for _, a := range list {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			d.addresses = append(d.addresses, p.Addr())
		}
	}
	return d
}

// addressKind takes an address for an own one where the kernel cannot be asked.
func addressKind(addr netip.Addr) netwatch.Kind {
	kind, err := netwatch.Classify(addr)
	if err != nil {
		return netwatch.Own
	}
	return kind
}

// depends reports whether it depends on interfaces and addresses where a socket is
// reached.
func depends(s *observer.Socket) bool {
	return s.Device != 0 || s.Address == netip.IPv6Unspecified() || !s.Address.IsUnspecified() && !s.Address.IsLoopback() && !s.Address.IsMulticast()
}

// reach returns where the guest itself reaches a socket at an address of its own, best first, or
// why it cannot: at 0.0.0.0 the IPv4 half of a socket at ::.
func (n *network) reach(s *observer.Socket, addr netip.Addr) (dial []netip.AddrPort, withheld port.Reason) {
	switch {
	case addr.IsMulticast():
		return nil, port.Because(port.MulticastAddress)
	case n.stands.Contains(addr):
		return nil, port.Because(port.AddressStands)
	case s.Device != 0:
		return n.onDevice(s, addr)
	case n.is4 && addr == netip.IPv6Unspecified():
		return nil, port.Because(port.AddressNowhere)
	case depends(s) && !addr.IsUnspecified():
		switch n.kind(addr) {
		case netwatch.Broadcast:
			return nil, port.Because(port.BroadcastAddress)
		case netwatch.Elsewhere:
			return nil, port.Because(port.AddressNowhere)
		}
	}
	return dialed(addr, s.Port), port.Reason{}
}

// onDevice is reach for a socket that is bound to an interface. The kernel delivers
// what the guest sends to an own address as received on the interface that has it, so
// the socket is reached at the interface's addresses and nowhere else. Through one that is
// down it sends no answer, to whomever (ip_route_output_key_hash_rcu of 6.12).
func (n *network) onDevice(s *observer.Socket, addr netip.Addr) (dial []netip.AddrPort, withheld port.Reason) {
	d := n.device(s.Device)
	name, own := d.name, d.addresses
	switch {
	case d.down:
		return nil, port.Because(port.InterfaceDown, name)
	case name == loopback && (addr.IsUnspecified() || addr.IsLoopback()):
		return dialed(addr, s.Port), port.Reason{}
	case !addr.IsUnspecified():
		if !slices.Contains(own, addr) {
			return nil, port.Because(port.InterfaceLacks, name)
		}
		return dialed(zoned(addr, name), s.Port), port.Reason{}
	}
	global := func(a netip.Addr) bool { return a.Is6() && !a.IsLinkLocalUnicast() }
	if addr.Is4() {
		dial = listed(own, name, s.Port, netip.Addr.Is4)
	} else if dial = listed(own, name, s.Port, global); len(dial) == 0 {
		dial = listed(own, name, s.Port, netip.Addr.Is6)
	}
	if len(dial) == 0 {
		return nil, port.Because(port.InterfaceBare, name)
	}
	return dial, port.Reason{}
}

const loopback = "lo"

// maxDial bounds the addresses at which a socket of an interface is tried.
const maxDial = 8

// listed returns the addresses that fit: another socket may have one of them alone.
func listed(own []netip.Addr, name string, p uint16, fits func(netip.Addr) bool) (dial []netip.AddrPort) {
	for _, a := range own {
		if fits(a) && len(dial) < maxDial {
			dial = append(dial, netip.AddrPortFrom(zoned(a, name), p))
		}
	}
	return dial
}

// zoned adds the interface to an IPv6 address that needs one.
func zoned(addr netip.Addr, name string) netip.Addr {
	if addr.Is6() && addr.IsLinkLocalUnicast() {
		return addr.WithZone(name)
	}
	return addr
}

// dialed returns where the guest itself reaches what is bound to an address that it has.
func dialed(addr netip.Addr, p uint16) []netip.AddrPort {
	if addr.IsUnspecified() {
		addr = port.Loopback(addr)
	}
	return []netip.AddrPort{netip.AddrPortFrom(addr, p)}
}
