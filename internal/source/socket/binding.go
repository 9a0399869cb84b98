// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/port"
)

func origin(s *observer.Socket) port.Origin {
	return port.Origin{Source: Name, ID: strconv.FormatUint(s.Cookie, 16)}
}

func (h *handler) binding(s *observer.Socket) port.Binding {
	addr := s.Address
	if s.Device != 0 && addr.IsLinkLocalUnicast() && addr.Is6() {
		addr = addr.WithZone(h.ifname(s.Device))
	}
	at := h.processes.attribute(s)
	b := port.Binding{
		Key:       port.Key{Protocol: s.Protocol, Address: addr, Port: s.Port},
		Origin:    origin(s),
		DualStack: addr == netip.IPv6Unspecified() && !s.V6Only,
		Dial:      dial(addr, s.Port, s.V6Only),
		Hints:     at.hints,
		Owner:     at.owner,
		Observed:  s.Observed,
	}
	b.Detail = port.NewDetail(at.detail)
	switch {
	case !s.Listening:
		b.Withheld = "bound, not listening"
		b.Dial = nil
	case s.Device != 0 && !addr.IsLinkLocalUnicast() && !h.answers(s.Device, addr):
		b.Withheld = "bound to interface " + h.ifname(s.Device) + ": not reachable at " + b.Dial[0].Addr().String()
		b.Dial = nil
	}
	if b.Withheld == "" && s.Protocol == port.UDP {
		if kind := h.unanswerable(addr); kind != "" {
			b.Withheld = "bound to " + kind + " address: no answer can come from there"
			b.Dial = nil
		}
	}
	return b
}

// answers reports whether the guest itself reaches a socket that is bound to an
// interface at the address where the publication is dialled. The kernel delivers what
// the guest sends to an own address as received on the interface that has it.
func (h *handler) answers(device uint32, addr netip.Addr) bool {
	if addr.IsUnspecified() || addr.IsLoopback() {
		return h.ifname(device) == "lo"
	}
	return h.assigned(device, addr)
}

// isAssigned reports whether an interface has an address.
func isAssigned(device uint32, addr netip.Addr) bool {
	i, err := net.InterfaceByIndex(int(device))
	if err != nil {
		return false
	}
	list, err := i.Addrs()
	return err == nil && slices.ContainsFunc(list, func(a net.Addr) bool {
		p, err := netip.ParsePrefix(a.String())
		return err == nil && p.Addr() == addr
	})
}

// unanswerable returns "a multicast" or "a broadcast" for an address that datagrams
// can be sent to but never come from, so that no flow to it gets an answer; "" for
// all others.
func (h *handler) unanswerable(addr netip.Addr) string {
	switch {
	case addr.IsMulticast():
		return "a multicast"
	case addr.Is4() && !addr.IsUnspecified() && addr != port.Loopback(netip.IPv4Unspecified()) && h.broadcast(addr):
		return "a broadcast"
	}
	return ""
}

// isBroadcast reports whether the kernel's routes have an IPv4 address as one of
// broadcast. A socket that may not send to such an address cannot connect to it. No
// datagram is sent.
func isBroadcast(addr netip.Addr) bool {
	if addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return true // also without a route
	}
	const discard = 9 // connect(2) needs some port
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	err = unix.Connect(fd, &unix.SockaddrInet4{Addr: addr.As4(), Port: discard})
	return errors.Is(err, unix.EACCES)
}

// dial returns where the guest itself reaches a socket bound to addr.
func dial(addr netip.Addr, p uint16, v6only bool) []netip.AddrPort {
	if !addr.IsUnspecified() {
		return []netip.AddrPort{netip.AddrPortFrom(addr, p)}
	}
	own := netip.AddrPortFrom(port.Loopback(addr), p)
	if addr.Is6() && !v6only {
		return []netip.AddrPort{netip.AddrPortFrom(port.Loopback(netip.IPv4Unspecified()), p), own}
	}
	return []netip.AddrPort{own}
}

// interfaceName returns the name, or else the number, which is a zone as well.
func interfaceName(index uint32) string {
	if i, err := net.InterfaceByIndex(int(index)); err == nil {
		return i.Name
	}
	return strconv.FormatUint(uint64(index), 10)
}
