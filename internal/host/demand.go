// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/wire"
)

// demander is a policy that asks guests for ports by name; rules.Set is one.
type demander interface {
	Demands(guest string) []port.Demand
	Demanding() []rules.Match
}

// demands are what a guest is asked for by name. h.mu guards them.
type demands struct {
	sent    []string          // nil if nothing was
	again   bool              // a session began after that
	waiting map[string]string // why, by demand, as the guest says; also what was asked for in the guest
	there   map[string]int    // publications, by demand; asked for by whomever
}

// countDemands adds n to the publications of each demand in list. h.mu is held.
func (g *guest) countDemands(list []string, n int) {
	d := &g.demands
	for _, text := range list {
		if d.there == nil {
			d.there = make(map[string]int)
		}
		if d.there[text] += n; d.there[text] == 0 {
			delete(d.there, text)
		}
		g.h.relist = true
	}
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
	if g.demands.sent != nil && !g.demands.again && slices.Equal(ports, g.demands.sent) {
		return nil
	}
	g.demands.sent, g.demands.again = ports, false
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
	g.h.listWaiting()
}

// demandsBegin notes that a session with a peer begins. What waited is known until that peer
// says what does, unless it may be one that does not say it. h.mu is held.
func (g *guest) demandsBegin(peer link.Peer) {
	g.demands.again = true
	if peer.Version != g.peer.Version || !peer.Unpublished && !peer.Demand {
		g.demands.waiting = nil
	}
}

// listWaiting has the table of unpublished ports list what waits: what rules ask for and no
// guest has, and what guests ask for themselves. h.mu is held.
func (h *Host) listWaiting() {
	h.relist = false
	waits := make(map[UnpublishedID]string)
	add := func(g *guest, d port.Demand, reason string) {
		waits[UnpublishedID{ID{g.name, port.Key{Protocol: d.Protocol, Port: d.Port}}, d.String()}] = reason
	}
	if p, ok := h.policy.(demander); ok {
		for _, m := range p.Demanding() {
			guests, reasons := h.demandReasons(m.Guest, m.Demand)
			for i, g := range guests {
				if !slices.Contains(reasons, "") {
					add(g, m.Demand, reasons[i])
				}
			}
		}
	}
	for _, g := range h.guests {
		for text, reason := range g.demands.waiting {
			if d, err := port.ParseDemand(text); err == nil && !slices.Contains(g.demands.sent, text) {
				add(g, d, reason)
			}
		}
	}
	if maps.Equal(waits, h.waits) {
		return
	}
	h.others.Update(func(tx *table.Tx[UnpublishedID, Unpublished]) {
		for id := range h.waits {
			if _, ok := waits[id]; !ok {
				tx.Delete(id)
			}
		}
		for id, reason := range waits {
			old, had := tx.Get(id)
			if had && old.Reason == reason {
				continue
			}
			since := old.Since
			if !had {
				since = time.Now()
			}
			tx.Put(id, Unpublished{UnpublishedID: id, Pending: true, Reason: reason, Source: port.SourceDemand, Since: since})
		}
	})
	h.waits = waits
}

// DemandReason returns why a port that a rule asks for by name is not there, of the guests
// that a pattern matches, "" being all; "" if it is, or if it is not known yet.
func (h *Host) DemandReason(pattern string, d port.Demand) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	guests, reasons := h.demandReasons(pattern, d)
	switch {
	case len(guests) == 0:
		return fmt.Sprintf("no guest is called %q: want one of %s", pattern, h.names())
	case len(guests) == 1:
		return reasons[0]
	}
	var list []string
	for i, why := range reasons {
		if why == "" {
			return ""
		}
		list = append(list, fmt.Sprintf("guest %q: %s", guests[i].name, why))
	}
	return strings.Join(list, "; ")
}

// demandReasons returns the guests that a pattern matches, and DemandReason for each. h.mu is
// held.
func (h *Host) demandReasons(pattern string, d port.Demand) (guests []*guest, reasons []string) {
	for _, g := range h.guests {
		if pattern == "" || rules.Glob(pattern, g.name) {
			guests, reasons = append(guests, g), append(reasons, g.demandReason(d))
		}
	}
	return guests, reasons
}

// demandReason is DemandReason for one guest. h.mu is held.
func (g *guest) demandReason(d port.Demand) string {
	switch {
	case g.demands.there[d.String()] > 0: // what became of it is for the publication to say
		return ""
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
