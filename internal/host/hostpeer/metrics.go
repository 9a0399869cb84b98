// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"time"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/host/route"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// Counters are what a host peer exports to Prometheus. They count from its start.
type Counters struct {
	Publications map[port.State]int `metric:"host_publications" label:"state=active; pending; conflict; failed; denied" help:"Current publications of all guests by state, which is the best of their outcomes."`
	Connected    int                `metric:"host_guests" label:"state=connected" help:"Configured guests by state."`
	Lost         int                `metric:"host_guests" label:"state=lost"`
	Host         host.Stats         `metric:"*"`
	Names        *route.Stats       `metric:"*"` // nil if names are not served
}

// count collects the host's counters.
func count(h *host.Host, r *route.Router) Counters {
	s := Counters{Publications: port.NoneByState(), Host: h.Stats()}
	if r != nil {
		n := r.Stats()
		s.Names = &n
		s.Host.OverLimit += n.Limited
		s.Host.OutOfDescriptors += n.Refused
	}
	view := h.View()
	for id, p := range view.All() {
		state := p.State()
		k, ok := id.Key.OtherFamily()
		if other, has := view.Get(host.ID{Guest: id.Guest, Key: k}); ok && has && other.Owner.Same(p.Owner) {
			if id.Address.Is6() {
				continue // its port was counted
			}
			state = max(state, other.State())
		}
		s.Publications[state]++
	}
	for _, g := range h.Guests() {
		if g.Connected {
			s.Connected++
		} else {
			s.Lost++
		}
	}
	return s
}

// vitals returns the numbers for the page's charts. A host has no kernel events, so
// there are no latencies.
func vitals(h *host.Host) status.Vitals {
	s := h.Stats()
	return status.Vitals{
		Time: time.Now().UTC(), TCP: s.OpenTCP, UDP: s.OpenUDP, ToGuest: s.ToGuest, ToHost: s.ToHost,
		Errors: s.Refused + s.Unlinked + s.OverLimit + s.OutOfDescriptors, Latencies: []float64{},
	}
}
