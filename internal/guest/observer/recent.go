// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import "time"

const (
	// A hook reports a change up to a few microseconds before a dump shows it, and
	// as much longer as the call is interrupted meanwhile.
	recentFor = time.Second

	// maxRecent bounds the events between the two, of all calls.
	maxRecent = 4096
)

// recent has the cookies of the last events, oldest first from next on.
type recent struct {
	events [maxRecent]struct {
		cookie uint64        // 0: none
		read   time.Duration // since the engine was made
	}
	next int
}

func (r *recent) add(cookie uint64, now time.Duration) {
	r.events[r.next].cookie, r.events[r.next].read = cookie, now
	r.next = (r.next + 1) % maxRecent
}

// each calls f with the cookies of the events that were read at most recentFor ago.
func (r *recent) each(now time.Duration, f func(cookie uint64)) {
	for i := 1; i <= maxRecent; i++ {
		e := &r.events[(r.next-i+maxRecent)%maxRecent]
		if now-e.read > recentFor {
			return
		}
		if e.cookie != 0 {
			f(e.cookie)
		}
	}
}

// forget forgets the events whose cookie f selects.
func (r *recent) forget(f func(cookie uint64) bool) {
	for i := range r.events {
		if e := &r.events[i]; f(e.cookie) {
			e.cookie = 0
		}
	}
}

func (r *recent) clear() { *r = recent{} }
