// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"net"
	"net/netip"
	"strconv"

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
	case s.Device != 0 && !addr.IsLinkLocalUnicast() && h.ifname(s.Device) != "lo":
		b.Withheld = "bound to interface " + h.ifname(s.Device) + ": not reachable from the guest itself"
		b.Dial = nil
	}
	return b
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
