// SPDX-License-Identifier: Apache-2.0

//go:build linux

package selftest

import (
	"errors"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// sockets records what an observer reports of our own sockets.
type sockets struct {
	own     func(cookie uint64) bool
	ready   chan struct{} // closed after the first set
	changed schedule.Signal

	mu      sync.Mutex
	methods map[string]string // by capability
	known   bool              // a set was reported
	seen    map[uint64]*sighting
}

// sighting is what was reported of one socket. Times are zero before.
type sighting struct {
	opened, closed       time.Time
	openEvent, goneEvent bool // reported by an event
}

func newSockets(own func(uint64) bool) *sockets {
	return &sockets{
		own: own, ready: make(chan struct{}), changed: schedule.NewSignal(),
		methods: make(map[string]string), seen: make(map[uint64]*sighting),
	}
}

// Methods implements observer.Handler.
func (r *sockets) Methods(methods []kernel.Method) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range methods {
		r.methods[m.Capability] = m.Name
	}
}

// Replace implements observer.Handler.
func (r *sockets) Replace(set []observer.Socket) {
	r.mu.Lock()
	defer r.mu.Unlock()
	present := make(map[uint64]bool)
	for _, s := range set {
		s.Observed = 0
		present[s.Cookie] = true
		r.note(observer.Event{Socket: s})
	}
	for cookie := range r.seen {
		if !present[cookie] {
			r.note(observer.Event{Gone: true, Socket: observer.Socket{Cookie: cookie}})
		}
	}
	if !r.known {
		r.known = true
		close(r.ready)
	}
	r.changed.Notify()
}

// Apply implements observer.Handler.
func (r *sockets) Apply(events []observer.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range events {
		r.note(e)
	}
	r.changed.Notify()
}

// Stale implements observer.Handler.
func (*sockets) Stale(error) {}

// note records an event of an own socket. The caller holds mu.
func (r *sockets) note(e observer.Event) {
	s := r.seen[e.Socket.Cookie]
	if s == nil {
		if e.Gone || !r.own(e.Socket.Cookie) {
			return
		}
		s = new(sighting)
		r.seen[e.Socket.Cookie] = s
	}
	switch {
	case e.Gone && s.closed.IsZero():
		s.closed, s.goneEvent = time.Now(), e.Socket.Observed != 0
	case !e.Gone && e.Socket.Listening && s.opened.IsZero():
		s.opened, s.openEvent = time.Now(), e.Socket.Observed != 0
	}
}

// opened returns when a socket was reported to serve, and by which method.
func (r *sockets) opened(p port.Protocol, cookie uint64) (string, time.Time, error) {
	return r.look(p, cookie, func(s *sighting) (time.Time, bool) { return s.opened, s.openEvent })
}

// closed returns when a socket was reported to be gone, and by which method.
func (r *sockets) closed(p port.Protocol, cookie uint64) (string, time.Time, error) {
	return r.look(p, cookie, func(s *sighting) (time.Time, bool) { return s.closed, s.goneEvent })
}

// errDumped is returned where hooks were attached and none reported a change.
var errDumped = errors.New("no event; only a dump of all sockets had it")

func (r *sockets) look(p port.Protocol, cookie uint64, of func(*sighting) (at time.Time, event bool)) (string, time.Time, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	method := r.methods[observer.TCPListen]
	if p == port.UDP {
		method = r.methods[observer.UDPBind]
	}
	s := r.seen[cookie]
	if s == nil {
		return method, time.Time{}, nil
	}
	at, event := of(s)
	if !at.IsZero() && !event && method != observer.MethodPoll {
		return method, at, errDumped
	}
	return method, at, nil
}
