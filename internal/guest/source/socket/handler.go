// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/compact"
)

// placed is a socket whose reach depends on the network, as it was fed.
type placed struct {
	socket observer.Socket
	at     []reached // for each of its bindings
}

// reached is where the guest reaches a binding, or why it cannot.
type reached struct {
	dial     []netip.AddrPort
	withheld port.Reason
}

func (r reached) equal(o reached) bool {
	return r.withheld == o.withheld && slices.Equal(r.dial, o.dial)
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

	mu        sync.Mutex          // guards what follows, and the order of calls of feed
	placed    map[uint64]placed   // sockets that depend on the network, by cookie
	peak      compact.Peak        // of placed
	mapped    map[uint64]struct{} // cookies of sockets whose IPv4 half was fed
	most      compact.Peak        // of mapped
	processes *processes
	bound     map[uint64][]port.Binding // by cookie: not fed yet, as it may listen at once
	timer     *time.Timer               // feeds what is bound; nil before the first
	stopped   bool
}

func (h *handler) Replace(sockets []observer.Socket) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.bound = make(map[uint64][]port.Binding) // they are in the set
	h.placed, h.peak = make(map[uint64]placed), compact.Peak{}
	h.mapped, h.most = make(map[uint64]struct{}), compact.Peak{}
	h.network.is4 = h.network.only4()
	h.processes.beginBatch()
	c := port.Change{Put: make([]port.Binding, 0, len(sockets))}
	keep := make(map[uint64]struct{}, len(sockets))
	for i := range sockets {
		if !h.own(sockets[i].Cookie) {
			h.put(&c, &sockets[i])
			keep[sockets[i].Cookie] = struct{}{}
		}
	}
	h.processes.retain(keep)
	h.feed.Replace(c.Put)
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
			c.Drop = append(c.Drop, origin(s.Cookie))
			h.unmap(&c, s.Cookie)
			delete(h.bound, s.Cookie)
			h.unplace(s.Cookie)
			h.processes.forget(s.Cookie)
		case h.mayListen(s):
			h.bound[s.Cookie] = h.bindings(nil, s)
		default:
			delete(h.bound, s.Cookie)
			h.put(&c, s)
		}
	}
	if h.timer != nil && len(h.bound) == 0 {
		h.timer.Stop()
	}
	if len(c.Put)+len(c.Drop) > 0 {
		h.feed.Apply(c)
	}
}

// put adds the bindings of a socket to a change, and remembers it if it depends on the network.
func (h *handler) put(c *port.Change, s *observer.Socket) {
	had := len(c.Put)
	c.Put = h.bindings(c.Put, s)
	if dual(s) {
		h.addMapped(s.Cookie)
	} else {
		h.unmap(c, s.Cookie)
	}
	if !s.Listening || !depends(s) {
		h.unplace(s.Cookie)
		return
	}
	if h.placed == nil {
		h.placed = make(map[uint64]placed)
	}
	p := placed{socket: *s}
	for _, b := range c.Put[had:] {
		p.at = append(p.at, reached{b.Dial, b.Withheld})
	}
	h.placed[s.Cookie] = p
	h.follow()
}

// addMapped notes that the IPv4 half of a socket is fed.
func (h *handler) addMapped(cookie uint64) {
	if h.mapped == nil {
		h.mapped = make(map[uint64]struct{})
	}
	h.mapped[cookie] = struct{}{}
}

// unmap drops the IPv4 half of a socket, if it was fed.
func (h *handler) unmap(c *port.Change, cookie uint64) {
	if _, ok := h.mapped[cookie]; !ok {
		return
	}
	c.Drop = append(c.Drop, mappedOrigin(cookie))
	delete(h.mapped, cookie)
	if h.most.Passed(len(h.mapped)) {
		h.mapped = compact.Map(h.mapped)
	}
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
	h.network.is4 = h.network.only4()
	h.processes.beginBatch()
	for _, old := range h.placed {
		s := old.socket
		if slices.EqualFunc(h.reaches(&s), old.at, reached.equal) {
			continue
		}
		s.Observed = 0 // no event of the socket
		h.put(&c, &s)
	}
	if len(c.Put) > 0 {
		h.feed.Apply(c)
	}
}

// reaches returns where the guest reaches each binding of a socket now.
func (h *handler) reaches(s *observer.Socket) (at []reached) {
	addrs := [...]netip.Addr{s.Address, netip.IPv4Unspecified()}
	n := 1
	if dual(s) {
		n = 2
	}
	for _, a := range addrs[:n] {
		dial, withheld := h.network.reach(s, a)
		at = append(at, reached{dial, withheld})
	}
	return at
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
		h.bound = make(map[uint64][]port.Binding)
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
	var c port.Change
	for cookie, bs := range h.bound {
		c.Put = append(c.Put, bs...)
		if len(bs) > 1 {
			h.addMapped(cookie)
		}
	}
	h.bound = make(map[uint64][]port.Binding) // clear would keep its memory
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
		if r.Capability == observer.UDPDump || r.Capability == observer.Device || r.Capability == observer.OwnerName {
			continue // how a dump is read, and details, not how sockets are observed
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
