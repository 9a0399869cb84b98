// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/wire"
)

// demander is a policy that asks guests for ports by name; rules.Set is one.
type demander interface {
	Demands(guest string) []port.Demand
}

// demands are what a guest is asked for by name. h.mu guards them.
type demands struct {
	sent    []string          // in this session; nil if nothing was
	waiting map[string]string // why, by demand, as the guest says
}

// demandMessage returns what there is to send of demands, nil if the guest knows. h.mu is held.
func (g *guest) demandMessage() *wire.Demand {
	if !g.connected || !g.peer.Demand {
		return nil
	}
	ports := []string{}
	if p, ok := g.h.policy.(demander); ok {
		for _, d := range p.Demands(g.name) {
			ports = append(ports, d.String())
		}
	}
	ports = ports[:min(len(ports), wire.MaxDemands)]
	if g.demands.sent != nil && slices.Equal(ports, g.demands.sent) {
		return nil
	}
	g.demands.sent = ports
	return &wire.Demand{Ports: ports}
}

// applyDemanded notes what waits. The texts are the guest's.
func (g *guest) applyDemanded(m *wire.Demanded) {
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	g.demands.waiting = make(map[string]string, len(m.Waiting))
	for _, w := range m.Waiting {
		g.demands.waiting[w.Port] = w.Reason
	}
}

// DemandReason returns why a port that a rule asks for by name is not there, of the guests
// that a pattern matches, "" being all; "" if it is, or if it is not known yet.
func (h *Host) DemandReason(pattern string, d port.Demand) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var names, reasons []string
	for _, g := range h.guests {
		if pattern != "" && !rules.Glob(pattern, g.name) {
			continue
		}
		names, reasons = append(names, g.name), append(reasons, g.demandReason(d))
	}
	switch {
	case len(names) == 0:
		return fmt.Sprintf("no guest is called %q: want one of %s", pattern, h.names())
	case len(names) == 1:
		return reasons[0]
	}
	var list []string
	for i, why := range reasons {
		if why == "" {
			return ""
		}
		list = append(list, fmt.Sprintf("guest %q: %s", names[i], why))
	}
	return strings.Join(list, "; ")
}

// demandReason is DemandReason for one guest. h.mu is held.
func (g *guest) demandReason(d port.Demand) string {
	switch {
	case !g.connected:
		return fmt.Sprintf("guest %q is not connected", g.name)
	case !g.peer.Demand:
		return fmt.Sprintf("guest %q lets no host ask for what nobody published: set hostForwards: true (--host-forwards) in its configuration, "+
			"or run this in the guest; an agent older than this host knows neither", g.name)
	case !slices.Contains(g.demands.sent, d.String()) && len(g.demands.sent) >= wire.MaxDemands:
		return fmt.Sprintf("more than %d ports are asked for by name", wire.MaxDemands)
	}
	return g.demands.waiting[d.String()]
}
