// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"net/netip"
	"strconv"

	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
)

func origin(cookie uint64) port.Origin {
	return port.Origin{Source: Name, ID: strconv.FormatUint(cookie, 16)}
}

// mappedOrigin is the origin of the IPv4 half of a socket.
func mappedOrigin(cookie uint64) port.Origin {
	o := origin(cookie)
	o.ID += "/4"
	return o
}

// dual reports whether a socket takes both families. It then has two bindings.
func dual(s *observer.Socket) bool { return s.Address == netip.IPv6Unspecified() && !s.V6Only }

// bindings appends the bindings of a socket: two if it takes both families.
func (h *handler) bindings(to []port.Binding, s *observer.Socket) []port.Binding {
	b := h.binding(s)
	to = append(to, b)
	if dual(s) {
		b.Address, b.Origin, b.Mapped = netip.IPv4Unspecified(), mappedOrigin(s.Cookie), true
		if s.Listening {
			b.Dial, b.Withheld = h.network.reach(s, b.Address)
		}
		to = append(to, b)
	}
	return to
}

// binding is the binding of a socket at its own address.
func (h *handler) binding(s *observer.Socket) port.Binding {
	addr := s.Address
	if s.Device != 0 && addr.Is6() && addr.IsLinkLocalUnicast() {
		addr = addr.WithZone(h.network.device(s.Device).name)
	}
	at := h.processes.attribute(s)
	b := port.Binding{
		Key:      port.Key{Protocol: s.Protocol, Address: addr, Port: s.Port},
		Origin:   origin(s.Cookie),
		Hints:    at.hints,
		Owner:    at.owner,
		Observed: s.Observed,
	}
	b.Detail = at.detail
	b.Searching = (at.owner.Kind == port.OwnerUnknown || at.missed) && !s.Sought
	if b.Searching && at.missed {
		h.search(s.Cookie)
	}
	if !s.Listening {
		b.Withheld = port.Because(port.Unlistened)
		return b
	}
	b.Dial, b.Withheld = h.network.reach(s, s.Address)
	return b
}
