// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/compact"
	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/registry"
)

// placed is a socket whose reach depends on the network, as it was fed.
type placed struct {
	socket   observer.Socket
	dial     []netip.AddrPort
	withheld port.Reason
}

// boundDelay is how long a TCP socket that was bound may take until it listens.
// Nearly all do at once, and feeding both states would cost a second pass through
// all tables just when the first one should be fast.
const boundDelay = 5 * time.Millisecond

// handler turns what the observer reports into bindings.
type handler struct {
	feed    registry.Feed
	own     func(uint64) bool
	network network
	follow  func()              // called when recheck must follow changes of the network
	search  func(cookie uint64) // has the process searched that holds a socket now

	mu        sync.Mutex        // guards what follows, and the order of calls of feed
	placed    map[uint64]placed // sockets that depend on the network, by cookie
	peak      compact.Peak      // of placed
	processes *processes
	bound     map[uint64]port.Binding // by cookie: not fed yet, as it may listen at once
	timer     *time.Timer             // feeds what is bound; nil before the first
	stopped   bool
}

func (h *handler) Replace(sockets []observer.Socket) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.bound = make(map[uint64]port.Binding) // they are in the set
	h.placed, h.peak = make(map[uint64]placed), compact.Peak{}
	h.processes.beginBatch()
	set := make([]port.Binding, 0, len(sockets))
	keep := make(map[uint64]struct{}, len(sockets))
	for i := range sockets {
		if !h.own(sockets[i].Cookie) {
			set = append(set, h.place(&sockets[i]))
			keep[sockets[i].Cookie] = struct{}{}
		}
	}
	h.processes.retain(keep)
	h.feed.Replace(set)
}

func (h *handler) Apply(events []observer.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	// Within a batch the last event of a cookie decides.
	var last map[uint64]int
	var c port.Change
	if len(events) > 1 {
		last = make(map[uint64]int, len(events))
		for i := range events {
			last[events[i].Socket.Cookie] = i
		}
		c.Put = make([]port.Binding, 0, len(last))
	}
	h.processes.beginBatch()
	for i := range events {
		s := &events[i].Socket
		if last != nil && last[s.Cookie] != i {
			continue
		}
		switch {
		case h.own(s.Cookie):
			delete(h.bound, s.Cookie)
		case events[i].Gone:
			c.Drop = append(c.Drop, origin(s))
			delete(h.bound, s.Cookie)
			h.unplace(s.Cookie)
			h.processes.forget(s.Cookie)
		case h.mayListen(s):
			h.bound[s.Cookie] = h.binding(s)
		default:
			delete(h.bound, s.Cookie)
			c.Put = append(c.Put, h.place(s))
		}
	}
	if h.timer != nil && len(h.bound) == 0 {
		h.timer.Stop()
	}
	if len(c.Put)+len(c.Drop) > 0 {
		h.feed.Apply(c)
	}
}

// place returns the binding of a socket, and remembers it if it depends on the network.
func (h *handler) place(s *observer.Socket) port.Binding {
	b := h.binding(s)
	if !s.Listening || !depends(s) {
		h.unplace(s.Cookie)
		return b
	}
	if h.placed == nil {
		h.placed = make(map[uint64]placed)
	}
	h.placed[s.Cookie] = placed{*s, b.Dial, b.Withheld}
	h.follow()
	return b
}

// unplace forgets a socket that no longer depends on the network. Callers may range over
// h.placed: that goes on over the former map.
func (h *handler) unplace(cookie uint64) {
	delete(h.placed, cookie)
	if h.peak.Passed(len(h.placed)) {
		h.placed = compact.Map(h.placed)
	}
}

// recheck feeds the sockets that interfaces and addresses now let be reached in
// another way.
func (h *handler) recheck() {
	h.mu.Lock()
	defer h.mu.Unlock()
	var c port.Change
	h.processes.beginBatch()
	for _, old := range h.placed {
		dial, withheld := h.network.reach(&old.socket)
		if withheld == old.withheld && slices.Equal(dial, old.dial) {
			continue
		}
		s := old.socket
		s.Observed = 0 // no event of the socket
		c.Put = append(c.Put, h.place(&s))
	}
	if len(c.Put) > 0 {
		h.feed.Apply(c)
	}
}

// mayListen reports whether a socket was bound just now. It is fed when it listens,
// or after boundDelay.
func (h *handler) mayListen(s *observer.Socket) bool {
	if s.Listening || s.Observed == 0 || h.stopped {
		return false
	}
	if _, bound := h.bound[s.Cookie]; bound {
		return true
	}
	if h.processes.knows(s.Cookie) {
		return false // it was fed, maybe as one that listens
	}
	switch {
	case len(h.bound) > 0:
	case h.timer == nil:
		h.bound = make(map[uint64]port.Binding)
		h.timer = time.AfterFunc(boundDelay, h.feedBound)
	default:
		h.timer.Reset(boundDelay)
	}
	return true
}

// feedBound feeds the sockets that were bound and do not listen.
func (h *handler) feedBound() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopped || len(h.bound) == 0 {
		return
	}
	c := port.Change{Put: slices.Collect(maps.Values(h.bound))}
	h.bound = make(map[uint64]port.Binding) // clear would keep its memory
	h.feed.Apply(c)
}

// stop stops the timer for good.
func (h *handler) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopped = true
	if h.timer != nil {
		h.timer.Stop()
	}
}

func (h *handler) Stale(err error) { h.feed.Stale(err) }

// Methods feeds the method that all capabilities use, or else those of each.
func (h *handler) Methods(methods []kernel.Method) {
	var order []string
	uses := map[string][]string{}
	for _, r := range methods {
		if r.Capability == observer.UDPDump || r.Capability == observer.Device {
			continue // how a dump is read, and a detail, not how sockets are observed
		}
		if uses[r.Name] == nil {
			order = append(order, r.Name)
		}
		uses[r.Name] = append(uses[r.Name], r.Capability)
	}
	if len(order) == 1 {
		h.feed.Method(order[0])
		return
	}
	var parts []string
	for _, name := range order {
		parts = append(parts, fmt.Sprintf("%s (%s)", name, strings.Join(uses[name], ", ")))
	}
	h.feed.Method(strings.Join(parts, ", "))
}
