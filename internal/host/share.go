// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// rankShare bounds the time for ranking the claims of a guest: one part in so many.
const rankShare = 10

// sharer is who has a share of a guest's listeners. That is the guest's word: a guest can harm
// its own ports alone.
type sharer struct {
	protocol                 port.Protocol
	kind                     port.OwnerKind
	cluster, namespace, name string
}

// admit admits the claims of a guest: all, or as many as the limit allows. Of more, each owner
// has as many of its ports of a protocol as any other that wants more, its lowest ones. So what
// is open is decided by what is wanted now, not by what came first.
func (g *lockedGuest) admit() {
	if !g.unshared {
		return
	}
	limit := g.h.opt.MaxListeners
	was, began := g.short, time.Now()
	g.short = g.wanted > limit
	switch {
	case !g.short && !was:
		for _, c := range g.arrived {
			if !c.gone.Load() {
				g.h.join(c)
			}
		}
	case g.short && began.Before(g.rested):
		g.h.timers.Notify()
		return
	default:
		if g.rested.IsZero() { // once, as the guest decides how often this happens
			g.log.Warn("the guest asks for more listeners than --max-listeners; its owners share them", "asked", g.wanted, "limit", limit)
		}
		g.share(limit)
		now := time.Now()
		g.rested = now.Add(schedule.Rest(now.Sub(began), rankShare))
	}
	g.arrived, g.unshared = nil, false
}

// share admits the first claims up to a limit, and no others.
func (g *lockedGuest) share(limit int) {
	ranked := g.ranked()
	reason := port.Because(port.TooManyListeners, strconv.Itoa(limit))
	for _, c := range ranked[min(limit, len(ranked)):] {
		g.expel(c)
		c.set(port.Failed, c.addr, reason)
	}
	for _, c := range ranked[:min(limit, len(ranked))] {
		if !c.admitted {
			g.h.join(c)
		}
	}
}

// ranked returns all claims: the first one of each sharer, then the second ones, and so on.
func (g *lockedGuest) ranked() []*claim {
	all := make([]*claim, 0, g.wanted)
	for _, p := range g.pubs {
		all = append(all, p.claims...)
	}
	slices.SortFunc(all, func(a, b *claim) int { return cmp.Or(a.key.Compare(b.key), a.addr.Compare(b.addr)) })
	var rows [][]*claim
	had := make(map[sharer]int)
	for _, c := range all {
		o := c.pub.fact.Owner
		s := sharer{c.key.Protocol, o.Kind, o.Cluster, o.Namespace, o.Name}
		n := had[s]
		had[s]++
		if n == len(rows) {
			rows = append(rows, nil)
		}
		rows[n] = append(rows[n], c)
	}
	return slices.Concat(rows...)
}
