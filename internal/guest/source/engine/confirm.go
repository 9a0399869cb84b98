// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

var _ registry.Confirmer = (*Table)(nil)

// asks are the requests for a list that nobody has taken. The zero value is ready. Safe
// for concurrent use.
type asks struct {
	mu      sync.Mutex
	waiting []func()
	wake    schedule.Signal // nil until somebody looks at it
	absent  bool            // there is no engine: nothing runs
}

// Confirm implements [registry.Confirmer].
func (t *Table) Confirm(listed func()) bool {
	a := &t.asks
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting = append(a.waiting, listed)
	a.wake.Notify()
	return true
}

// Absent reports whether the engine has left no trace, so that a list names nothing.
func (t *Table) Absent() bool {
	t.asks.mu.Lock()
	defer t.asks.mu.Unlock()
	return t.asks.absent
}

// signal returns what receives when there are requests.
func (a *asks) signal() schedule.Signal {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.wake == nil {
		a.wake = schedule.NewSignal()
	}
	if len(a.waiting) > 0 {
		a.wake.Notify()
	}
	return a.wake
}

// peek returns the requests, which stay.
func (a *asks) peek() []func() {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.waiting)
}

// take removes the first n requests, or as many as somebody else has not taken.
func (a *asks) take(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting = slices.Delete(a.waiting, 0, min(n, len(a.waiting)))
}

// setAbsent notes whether there is an engine.
func (a *asks) setAbsent(absent bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.absent = absent
}

// confirming are requests that a list has answered but for some looks.
type confirming struct {
	listed []func()
	looks  map[string]struct{} // by container, that were wanted or under way after the list
}

// answer answers the requests for a list that was applied, when all looks have been: also those
// at containers that may be starting.
func (f *follower) answer(l look) {
	if len(l.listed) == 0 {
		return
	}
	for _, id := range l.starts {
		f.markSpare(id)
	}
	c := confirming{l.listed, make(map[string]struct{}, len(f.dirty))}
	for id := range f.dirty {
		c.looks[id] = struct{}{}
	}
	f.confirming = append(f.confirming, c)
	f.confirmed("")
}

// confirmed answers the requests for which there is nothing more to look at. A look at
// a container that is starting takes until it runs.
func (f *follower) confirmed(id string) {
	rest := f.confirming[:0]
	for _, c := range f.confirming {
		if delete(c.looks, id); len(c.looks) > 0 {
			rest = append(rest, c)
			continue
		}
		for _, listed := range c.listed {
			listed()
		}
	}
	clear(f.confirming[len(rest):])
	f.confirming = rest
}
