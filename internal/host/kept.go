// SPDX-License-Identifier: Apache-2.0

package host

import (
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// keptFor is how long a port is kept that the first snapshot of a process lacks: longer than most
// engines take to start.
const keptFor = 30 * time.Second

// A publication is kept that the snapshot of a new process of its guest lacks, which is
// incomplete. Its listeners stay open and connections wait a while. A connection
// that waited is requested of the guest as any other, which refuses what it does not publish;
// it ends if the port is withdrawn, or if rules deny what is published there by then.

// keep keeps a publication that an incomplete snapshot lacks, and reports whether it does: an
// earlier process of the same guest published it, and this one has not read all of its sources.
// A process that only lost its link knows what it published.
func (g *lockedGuest) keep(k port.Key) bool {
	pub := g.pubs[k]
	if g.sender.Name != g.status.Peer.Name || g.denies(k) || len(pub.claims) == 0 {
		return false
	}
	first := g.sender.Identity != g.status.Peer.Identity // snapshot of this process
	if pub.kept != nil || !first {
		return pub.kept != nil
	}
	if g.kept++; g.keptEnd.IsZero() { // once, so that a guest that restarts again and again keeps nothing for ever
		g.keptEnd = time.Now().Add(keptFor)
		g.h.timers.Notify()
	}
	released := make(chan struct{})
	pub.kept = &released
	for _, c := range pub.claims {
		c.kept.Store(pub.kept)
	}
	g.h.touch(pub)
	g.h.changed[pub] = struct{}{}
	return true
}

// denies reports whether a rule of the guest denies a port, by its current report.
func (g *lockedGuest) denies(k port.Key) bool {
	p, reported := g.others[k]
	return reported && p.Decision.Reason.Kind() == port.Denies
}

// unkeep ends that a publication is kept, which is then as any other.
func (g *lockedGuest) unkeep(pub *publication) {
	if pub.kept == nil {
		return
	}
	close(*pub.kept)
	pub.kept = nil
	if g.kept--; g.kept == 0 {
		g.keptEnd = time.Time{}
	}
	g.h.touch(pub)
	g.h.changed[pub] = struct{}{}
}

// removeKept withdraws what is still kept.
func (g *lockedGuest) removeKept(why string) {
	if g.kept == 0 {
		return
	}
	g.log.Info("closing ports that the guest has not reported again", "reason", why, "publications", g.kept)
	for k, pub := range g.pubs {
		if pub.kept != nil {
			g.remove(k)
		}
	}
}

// limitKept withdraws what is kept if it takes the room of what the guest publishes.
func (g *lockedGuest) limitKept() {
	if g.overLimit() || g.wanted > g.h.opt.MaxListeners {
		g.removeKept("limit of this guest reached")
	}
}

// denyKept withdraws what is kept and denied by a rule of the guest.
func (g *lockedGuest) denyKept(reported []port.Fact) {
	for _, p := range reported {
		if pub := g.pubs[p.Key]; pub != nil && pub.kept != nil && p.Decision.Reason.Kind() == port.Denies {
			g.remove(p.Key)
		}
	}
}
