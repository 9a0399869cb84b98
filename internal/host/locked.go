// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"time"

	"github.com/fairlead/fairlead/internal/port/compact"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/port/table"
)

// locked is the Host while its lock is held: what changes in steps. Host.lock gives it, and
// nothing of it is used after unlock. Publications, claims, groups and slots are reached
// through it alone, so their methods need no lock of their own.
type locked struct {
	*Host
	ctx    context.Context //nolint:containedctx // of Run: listeners outlive the step that opens them
	policy Policy
	guests []*lockedGuest // in the order of Options.Guests

	// Which claim has which address.
	groups map[groupKey]*group
	peak   compact.Peak // of groups
	moved  map[ID]move  // ports that were opened instead of others

	// What this step changed; unlock clears both.
	touched map[*group]struct{}       // to be decided again
	changed map[*publication]struct{} // to be published again

	// Slots for which something remains to be done or known.
	anyPort map[*slot]struct{} // of any free port
	retries schedule.Deadlines[*slot]
	unheld  map[*slot]struct{} // holder to be looked up
	taken   func(Socket) bool  // what the Vetter said before the last step that may open ports
}

// lock begins a step, which ends with unlock.
func (h *Host) lock() *locked {
	h.mu.Lock()
	return &h.state
}

// lockToOpen is lock for a step that may open ports. A Vetter is asked before the lock is
// held, because that may take long.
func (h *Host) lockToOpen() *locked {
	v, ok := h.opt.Holders.(Vetter)
	if !ok {
		return h.lock()
	}
	taken := v.Vet()
	l := h.lock()
	l.taken = taken
	return l
}

// unlock ends a step: it decides what the step touched, opens and closes ports accordingly,
// and publishes the result.
func (h *locked) unlock() {
	defer h.mu.Unlock()
	for again := len(h.touched)+len(h.changed) > 0; again; again = h.move() {
		for _, g := range h.guests {
			g.admit()
		}
		for g := range h.touched {
			g.decide(h)
		}
		h.touched = compact.Clear(h.touched)
	}
	if len(h.changed) > 0 {
		h.publish()
	}
}

// publish puts what this step changed into the table, from which the guests are sent it.
func (h *locked) publish() {
	h.table.Update(func(tx *table.Tx[ID, Row]) {
		for p := range h.changed {
			switch p.guest.pubs[p.Key] {
			case p:
				tx.Put(p.id(), p.view())
			case nil:
				tx.Delete(p.id())
			}
		}
	})
	h.changed = compact.Clear(h.changed)
	if h.peak.Passed(len(h.groups)) {
		h.groups = compact.Map(h.groups)
		for _, g := range h.guests {
			g.pubs = compact.Map(g.pubs)
		}
	}
}

// runTimers does what is due: retries, and ends of grace periods.
func (h *Host) runTimers(ctx context.Context) {
	for ctx.Err() == nil {
		next := h.next()
		if !next.IsZero() && !next.After(time.Now()) {
			l := h.lockToOpen()
			l.due(time.Now())
			l.unlock()
			continue
		}
		_ = schedule.Wait(ctx, next, h.timers)
	}
}

// next returns when something is due, zero for never.
func (h *Host) next() time.Time {
	l := h.lock()
	defer l.unlock()
	at := l.retries.Next()
	for _, g := range l.guests {
		ends := [...]time.Time{g.graceEnd, g.keptEnd, {}}
		if g.unshared && g.short {
			ends[2] = g.rested
		}
		for _, end := range ends {
			if !end.IsZero() && (at.IsZero() || end.Before(at)) {
				at = end
			}
		}
	}
	return at
}

// due does what is due now.
func (h *locked) due(now time.Time) {
	for _, g := range h.guests {
		if !g.graceEnd.IsZero() && !g.graceEnd.After(now) {
			g.graceEnd = time.Time{}
			if n := len(g.pubs); n > 0 {
				g.log.Info("grace period expired; closing listeners", "publications", n)
			}
			g.withdraw()
		}
		if !g.keptEnd.IsZero() && !g.keptEnd.After(now) {
			g.removeKept("its time is over")
		}
		g.admit()
	}
	// What is due soon is done now: one wake-up for many.
	for _, s := range h.retries.TakeAll(now.Add(retrySlack)) {
		s.retry()
	}
}
