// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
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
	asked   []string             // what the policy asks for, each once
	ended   map[string]time.Time // what it asked for before; when a port that is still there counts as the guest's own
	sent    []string             // nil if nothing was
	again   bool                 // a session began after that
	waiting map[string]string    // why, by demand, as the guest says; also what was asked for in the guest
	told    bool                 // waiting is of this session
	there   map[string]int       // publications, by demand; asked for by whomever
}

// withdrawalTime is how long a guest has to withdraw what it was told that nobody here asks for
// any more.
const withdrawalTime = 2 * time.Second

// ask notes what the policy asks the guest for. h.mu is held.
func (g *guest) ask() {
	g.demands.asked = nil
	if p, ok := g.h.policy.(demander); ok {
		for _, d := range p.Demands(g.name) {
			g.demands.asked = append(g.demands.asked, d.String())
		}
	}
}

// isDemanded reports whether a publication is there by its name alone.
func (p *publication) isDemanded() bool {
	return p.wire.Source == port.SourceDemand && len(p.wire.Demands) > 0
}

// isNamed reports whether a publication is asked for by a name.
func (p *publication) isNamed(demand string) bool { return slices.Contains(p.wire.Demands, demand) }

// isEnding reports whether a publication is there by its name alone, and the guest was asked for
// it and has not had the time to withdraw it since. The rule that asked for it said where it is
// to be open; without it the address is one that nobody wants. h.mu is held.
func (g *guest) isEnding(p *publication) bool {
	if !p.isDemanded() || !g.peer.Demand {
		return false
	}
	was := false
	for _, d := range p.wire.Demands {
		if slices.Contains(g.demands.asked, d) {
			return false
		}
		_, ended := g.demands.ended[d]
		was = was || ended || slices.Contains(g.demands.sent, d)
	}
	return was
}

// noteEnded notes what the guest is told not to be asked for any more. h.mu is held.
func (g *guest) noteEnded() {
	d := &g.demands
	if d.ended == nil {
		d.ended = make(map[string]time.Time)
	}
	until := time.Now().Add(withdrawalTime)
	for text := range d.ended {
		if d.again { // it was told so in an earlier session
			d.ended[text] = until
		}
	}
	for _, text := range d.sent {
		d.ended[text] = until
	}
	maps.DeleteFunc(d.ended, func(text string, _ time.Time) bool { return slices.Contains(d.asked, text) })
	if len(d.ended) > 0 {
		g.h.timers.Notify()
	}
}

// nextEnd returns the first time of what ended, zero for never: a guest that is away, or was told
// nothing in this session, may not have heard of it. h.mu is held.
func (g *guest) nextEnd() (at time.Time) {
	if !g.connected || g.demands.again {
		return at
	}
	for _, end := range g.demands.ended {
		if at.IsZero() || end.Before(at) {
			at = end
		}
	}
	return at
}

// decideEnded decides anew about what the guest has not withdrawn in time: somebody asks for it
// there. What is kept is removed, as the guest has not said that it is there. h.mu is held; the
// caller commits.
func (g *guest) decideEnded(now time.Time) {
	if at := g.nextEnd(); at.IsZero() || at.After(now) {
		return
	}
	var ending []*publication
	for _, p := range g.pubs {
		if g.isEnding(p) {
			ending = append(ending, p)
		}
	}
	maps.DeleteFunc(g.demands.ended, func(_ string, until time.Time) bool { return !until.After(now) })
	for _, p := range ending {
		if g.kept.has(p.Key) && !g.isEnding(p) {
			g.remove(p.Key)
		} else {
			g.decide(p)
		}
	}
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
	ports := append([]string{}, g.demands.asked[:min(len(g.demands.asked), wire.MaxDemands)]...)
	if g.demands.sent != nil && !g.demands.again && slices.Equal(ports, g.demands.sent) {
		return nil
	}
	g.noteEnded()
	g.demands.sent, g.demands.again = ports, false
	return &wire.Demand{Ports: ports}
}

// awaits reports whether this host asks for a publication by its name, and the guest has not said
// in this session that it waits. h.mu is held.
func (g *guest) awaits(p *publication) bool {
	return p.isDemanded() && g.peer.Demand && slices.ContainsFunc(p.wire.Demands, func(d string) bool {
		_, waits := g.demands.waiting[d]
		return slices.Contains(g.demands.asked, d) && (!waits || !g.demands.told)
	})
}

// applyDemanded notes what waits, and removes what was kept by its name and does not come. The
// texts are the guest's.
func (g *guest) applyDemanded(ctx context.Context, m *wire.Demanded) {
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	g.demands.told, g.demands.waiting = true, make(map[string]string, len(m.Waiting))
	for _, w := range m.Waiting {
		g.demands.waiting[w.Port] = w.Reason
	}
	if g.connected && !g.incomplete && ctx.Err() == nil { // else the first snapshot is to come
		for _, k := range g.kept.namedKeys() {
			if !g.awaits(g.pubs[k]) {
				g.remove(k)
			}
		}
		g.h.commit(ctx)
	}
	g.h.listWaiting()
}

// demandsBegin notes that a session with a peer begins. What waited is known until that peer
// says what does, unless it may be one that does not say it. h.mu is held.
func (g *guest) demandsBegin(peer link.Peer) {
	g.demands.again, g.demands.told = true, false
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
