// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"time"

	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Confirmer is implemented by facts of an engine that can be asked what runs.
type Confirmer interface {
	// Confirm asks for a list of all that runs, which begins after the call, and returns
	// at once. listed is called when the facts and the feed have what the list names, and the
	// containers that were starting meanwhile: once, by another goroutine, and never if the
	// engine is lost before, as its source is stale then. It returns false if the engine is not
	// asked for lists.
	Confirm(listed func()) bool
}

const (
	// reportTime is how long engines are given to report a container before they are
	// asked for lists.
	reportTime = time.Second
	// listPause is at least between the answer to one request for a list and the next
	// request. A container that is starting may be missing in one list.
	listPause = 2 * time.Second
	// listShare is the part of the time that the lists of one engine may take: one in so
	// many.
	listShare = 5
	// mostListPause is the longest pause for that. An answer may also be late because a
	// container takes long to start, or because the machine slept.
	mostListPause = 10 * time.Second
)

// confirmation is what an engine was asked for and has answered. The registry's lock
// guards it.
type confirmation struct {
	ask      Confirmer    // nil if it cannot be asked
	declined bool         // it is not asked, as long as it is live
	session  int          // counts losses of an engine; earlier answers do not count
	asked    time.Time    // when the list under way was asked for, zero if there is none
	rests    time.Time    // until when no other list is asked for, after the last answer
	lists    [2]time.Time // when the last two that were answered were asked for, the older first
}

// timed reports whether waits for the engine end by the time alone.
func (c *confirmation) timed() bool { return c.ask == nil || c.declined }

// settled reports whether two lists that began after a time name all that runs.
func (c *confirmation) settled(from time.Time) bool { return !c.lists[0].Before(from) }

// reset forgets all lists, after an engine was lost. What they cost still counts.
func (c *confirmation) reset() {
	*c = confirmation{ask: c.ask, session: c.session + 1, rests: c.rests}
}

// request notes that the engine is asked now, and returns what asks it. That is called
// without the registry's lock.
func (r *Registry) request(c *confirmation, now time.Time) (ask func()) {
	c.asked = now
	session, engine := c.session, c.ask
	answer := func(declined bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		answered := r.now()
		c.rests = answered.Add(max(listPause, min(schedule.Rest(answered.Sub(now), listShare), mostListPause)))
		if c.session != session {
			return
		}
		c.lists, c.asked, c.declined = [2]time.Time{c.lists[1], c.asked}, time.Time{}, declined
		r.waits.wake.Notify()
	}
	return func() {
		if !engine.Confirm(func() { answer(false) }) {
			answer(true)
		}
	}
}
