// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"time"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/metrics"
	"github.com/fairlead/fairlead/internal/names/route"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// count collects the host's counters.
func count(h *host.Host, r *route.Router) metrics.HostSnapshot {
	st := h.Stats()
	s := metrics.HostSnapshot{
		Publications: make(map[port.State]int),
		OpenTCP:      st.OpenTCP, OpenUDP: st.OpenUDP, Listeners: st.Listeners,
		OK: st.OK, Refused: st.Refused, Disconnected: st.Unlinked, OverLimit: st.OverLimit, OutOfDescriptors: st.OutOfDescriptors,
		DatagramsDropped: st.DatagramsDropped, UDPEvicted: st.UDPEvicted,
		ToGuest: st.ToGuest, ToHost: st.ToHost,
		Snapshots: st.Snapshots, Changes: st.Changes, Resyncs: st.Resyncs,
		Conflicts: st.Conflicts, ListenFailures: st.ListenFailures,
	}
	if r != nil {
		n := r.Stats()
		s.Names, s.NamesHTTP, s.NamesTLS = n.Results, n.HTTP, n.TLS
		s.OverLimit += n.Limited
		s.OutOfDescriptors += n.Refused
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
