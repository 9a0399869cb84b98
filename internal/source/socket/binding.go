// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
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
	if s.Device != 0 && addr.Is6() && addr.IsLinkLocalUnicast() {
		addr = addr.WithZone(h.network.name(s.Device))
	}
	at := h.processes.attribute(s)
	b := port.Binding{
		Key:       port.Key{Protocol: s.Protocol, Address: addr, Port: s.Port},
		Origin:    origin(s),
		DualStack: addr == netip.IPv6Unspecified() && !s.V6Only,
		Hints:     at.hints,
		Owner:     at.owner,
		Observed:  s.Observed,
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
	b.Dial, b.Withheld = h.network.reach(s)
	return b
}
