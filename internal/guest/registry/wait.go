// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// ownerWait is how long a port whose decision depends on its owner waits for an engine that
// cannot be asked for lists, or for its process, counted from when all engines are live.
const ownerWait = 10 * time.Second

// state tells whether the owner of a publication may be another one. The package comment
// has the table of what enters and leaves each.
type state uint8

const (
	certain  state = iota // no other owner is expected
	awaited               // engines may name another one
	searched              // engines, or the search for the socket's process
	stopped               // the container behind a NAT rule may start again
	orphaned              // the Service was deleted, and its rules are left
	givenUp               // nobody was named: the owner counts as known
)

// ends reports whether engines, or the time, end the state.
func (s state) ends() bool { return s == awaited || s == searched }

// pending reports whether rules that name an owner are not decided yet.
func (s state) pending() bool { return s != certain && s != givenUp }

// wait is the state of a publication's owner.
type wait struct {
	state
	known precedence // how well the owner is known
	from  time.Time  // when the wait began
}

// waits are the publications whose owner may be another one. The registry's lock guards it.
type waits struct {
	byKey map[port.Key]wait
	wake  schedule.Signal
	at    time.Time // when Run looks at them by itself, zero if it does not
	live  time.Time // since when all engines are live, zero if they are not

	confirmations []*confirmation // of each engine
}

// next returns the wait that follows w. d is the doubt about the owner, who is known that
// well. deleted says that the owner was a Service, and is the container behind it now.
func (ws *waits) next(w wait, d doubt, known precedence, deleted bool, now time.Time) wait {
	switch {
	case d.unclaimed && known < service && (deleted || w.state == orphaned):
		return wait{state: orphaned}
	case d.stopped:
		return wait{state: stopped}
	case d.since().IsZero():
		return wait{}
	}
	// A wait goes on until there is a new doubt, or less is known.
	goesOn := (w.ends() || w.state == givenUp) && known >= w.known && !d.since().After(w.from)
	next := wait{awaited, known, now}
	if goesOn {
		next.from = w.from
	}
	if d.search {
		next.state = searched
	}
	if over, _, _ := ws.left(next.from, d.search, now); over || goesOn && w.state == givenUp {
		next.state = givenUp
	}
	return next
}

// decide sets the decision of m, whose port had an owner of that kind, and notes the state of
// its owner.
func (r *Registry) decide(m *merged, old port.OwnerKind) {
	p, d, now := &m.Publication, m.doubt, r.now()
	if len(r.engines) == 0 && !d.search {
		d = doubt{}
	}
	deleted := old == port.OwnerService && p.Owner.Kind == port.OwnerContainer
	w := r.waits.next(r.waits.byKey[p.Key], d, m.known, deleted, now)
	r.waits.set(p.Key, w, now)
	p.OwnerPending = w.pending() && !d.owner.IsZero()
	r.apply(p)
	if w.pending() && !p.OwnerPending && p.Decision.Allow {
		p.OwnerPending = true // who else is behind a NAT rule can only add a denial
		r.apply(p)
	}
}

// set notes a wait, and wakes Run if that is to look at it earlier than planned.
func (ws *waits) set(k port.Key, w wait, now time.Time) {
	if w.state == certain {
		delete(ws.byKey, k)
		return
	}
	if ws.byKey == nil {
		ws.byKey = make(map[port.Key]wait)
	}
	ws.byKey[k] = w
	if !w.ends() {
		return
	}
	_, next, due := ws.left(w.from, w.state == searched, now)
	if len(due) > 0 || !next.IsZero() && (ws.at.IsZero() || next.Before(ws.at)) {
		ws.wake.Notify()
	}
}

// left returns what is left of a wait that began then: whether it is over, as all engines
// are live, those that can be asked have answered, and the time has passed for the others
// and for the search; or else which engines are to be asked now, and when to look again, the
// zero time if only an answer or an engine that comes back can end it.
func (ws *waits) left(from time.Time, search bool, now time.Time) (over bool, next time.Time, due []*confirmation) {
	if ws.live.IsZero() {
		return false, next, nil
	}
	from, over = latest(from, ws.live), true
	timed := search || len(ws.confirmations) == 0
	for _, c := range ws.confirmations {
		if c.timed() {
			timed = true
			continue
		}
		if c.settled(from.Add(reportTime)) {
			continue
		}
		over = false
		switch t := latest(from.Add(reportTime), c.rests); {
		case !c.asked.IsZero():
		case t.After(now):
			next = earliest(next, t)
		default:
			due = append(due, c)
		}
	}
	if end := from.Add(ownerWait); timed && end.After(now) {
		over, next = false, earliest(next, end)
	}
	return over, next, due
}

// earliest returns the earlier of two times, of which the zero time is none.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// Run asks engines for lists and ends the waits for owners that none names. It returns
// when ctx ends.
func (r *Registry) Run(ctx context.Context) error {
	for {
		next, asks := r.endWaits()
		for _, ask := range asks {
			ask()
		}
		if !next.IsZero() { // by Options.Now, which may be another clock
			next = time.Now().Add(next.Sub(r.now()))
		}
		if err := schedule.Wait(ctx, next, r.waits.wake); err != nil {
			return err
		}
	}
}

// endPause is between two looks at the waits, of which there may be thousands.
const endPause = 250 * time.Millisecond

// endWaits gives up what has waited long enough, and returns what asks engines for lists,
// and when to look again, the zero time if nothing waits for a time.
func (r *Registry) endWaits() (next time.Time, asks []func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waits.at = time.Time{}
	now, dirty := r.now(), new(touched)
	for k, w := range r.waits.byKey {
		if !w.ends() {
			continue
		}
		over, t, due := r.waits.left(w.from, w.state == searched, now)
		if over {
			dirty.mark(k.Slot(), 0)
		}
		for _, c := range due {
			asks = append(asks, r.request(c, now))
		}
		next = earliest(next, t)
	}
	r.merge(dirty)
	if !next.IsZero() {
		next = latest(next, now.Add(endPause))
	}
	r.waits.at = next
	return next, asks
}

// enginesLive reports whether every source that has facts is live.
func (r *Registry) enginesLive() bool {
	live := 0
	for _, s := range r.sources {
		if !r.engines[s.name] {
			continue
		}
		if s.status.State != Live && s.status.State != Disabled {
			return false
		}
		live++
	}
	return live == len(r.engines)
}

// engineStateChanged looks again at what depends on whether engines are live: claims
// of s, facts, and NAT rules whose attribution may have been old. The waits begin
// anew when the last engine became live.
func (r *Registry) engineStateChanged(s *source) {
	was, live := !r.waits.live.IsZero(), r.enginesLive()
	switch {
	case !live:
		r.waits.live = time.Time{}
		for _, c := range r.waits.confirmations {
			c.reset()
		}
	case !was:
		r.waits.live = r.now()
	}
	dirty := new(touched)
	for _, b := range s.set {
		dirty.mark(b.Slot(), 0)
	}
	r.owners.all(r.now(), live, func(s port.Slot) { dirty.mark(s, 0) })
	if live {
		r.confirm(dirty)
	}
	r.merge(dirty)
	if live {
		r.waits.wake.Notify()
	}
}
