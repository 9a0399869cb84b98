// SPDX-License-Identifier: Apache-2.0

// Package listener is the sink that opens real listeners in the guest for
// publications that have no socket of their own, so that whoever forwards what
// listens there (WSL's localhost relay) sees them too. Such a placeholder serves
// what reaches it: the connection is carried to what the publication names.
//
// A placeholder is never in the way of a real server: it opens only if nobody
// else did within a settle time, never shares a port, and is closed when a
// server is seen to want its port.
package listener

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/forward"
	"github.com/fairlead/fairlead/internal/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
)

// Name is the sink's name in the configuration and in status.
const Name = "listener"

const (
	conflictFirst = 250 * time.Millisecond // between attempts at an address that is taken
	conflictMax   = 10 * time.Second
	failureMax    = 30 * time.Second // the same at one that cannot be had

	// A server that was refused a port may be started again by hand.
	yieldFirst = 30 * time.Second
	yieldMax   = 10 * time.Minute
)

// Network opens sockets that are known as our own before they are bound
// (own.Sockets).
type Network interface {
	Listen(ctx context.Context, network, address string) (net.Listener, error)
	// ListenExclusive is Listen that fails where another socket has the port, if
	// only bound, and where connections are left over from an earlier listener.
	ListenExclusive(ctx context.Context, network, address string) (net.Listener, error)
	ListenPacket(ctx context.Context, network, address string) (*own.UDPConn, error)
}

// Options configures a Sink. Network, Serve, Sockets and Logger are required.
type Options struct {
	Network Network
	// Serve carries a connection to what serves pub, owns it, and has closed or
	// reset it when it returns. The end of ctx cuts it.
	Serve func(ctx context.Context, conn net.Conn, pub port.Publication) error
	// ServeUDP, if not nil, asks for UDP: it carries the datagrams of one client,
	// as a link's stream has them, and owns the stream.
	ServeUDP func(ctx context.Context, client forward.Datagrams, req forward.Request) error
	// Sockets returns all that is known at a port, whatever the rules say of it:
	// who holds it is read from that.
	Sockets func(port.Slot) []port.Publication
	// Watch, if not nil, is told the ports at which placeholders are open, or
	// about to be, so that Contend is called when somebody wants one. It must not
	// call back.
	Watch func(port uint16, on bool)
	// Keep, if not nil, is told the addresses of TCP placeholders as they open and
	// close, to keep rules of NAT from taking what is meant for them. It must not
	// call back.
	Keep func(at netip.AddrPort, on bool)
	// Settle is how long a publication must be without a socket of its own before
	// a placeholder opens; 750 ms if 0.
	Settle time.Duration
	// Patience is the same for a rule that an engine writes before it starts a
	// proxy of its own, until the engine says that the container runs; 10 s if 0.
	Patience time.Duration
	// MaxFlows bounds the connections at one time; 10,240 if 0.
	MaxFlows int
	Logger   *slog.Logger
}

func (o Options) complete() (Options, error) {
	switch {
	case o.Network == nil || o.Serve == nil || o.Sockets == nil || o.Logger == nil:
		return o, errors.New("listener options: Network, Serve, Sockets and Logger are required")
	case o.Settle < 0 || o.Patience < 0 || o.MaxFlows < 0:
		return o, errors.New("listener options: Settle, Patience and MaxFlows: want 0 for the default, or more")
	}
	if o.Settle == 0 {
		o.Settle = 750 * time.Millisecond
	}
	if o.Patience == 0 {
		o.Patience = 10 * time.Second
	}
	o.Patience = max(o.Patience, o.Settle)
	if o.MaxFlows == 0 {
		o.MaxFlows = 10_240
	}
	if o.Watch == nil {
		o.Watch = func(uint16, bool) {}
	}
	if o.Keep == nil {
		o.Keep = func(netip.AddrPort, bool) {}
	}
	return o, nil
}

// ErrForbidden is why a flow ends that a rule forbids; context.Cause of Serve's context.
var ErrForbidden = errors.New("the port is no longer allowed")

// Sink keeps placeholders. It implements reconcile.Sink.
type Sink struct {
	o     Options
	log   *slog.Logger
	wake  chan struct{} // to the reconciler
	kick  chan struct{} // to Run: look at what is due
	stats counters
	wg    sync.WaitGroup // of accept loops and flows

	mu      sync.Mutex
	ctx     context.Context //nolint:containedctx // of Run: what it owns outlives the Sync that asked for it
	synced  uint64
	claims  map[port.Key][]*claim
	groups  map[groupKey]*group
	holds   map[*hold]struct{}
	watched map[uint16]int
	dirty   map[port.Key]struct{} // whose outcomes changed
	flows   *forward.Book
}

// New returns a sink. It opens nothing before Run.
func New(o Options) (*Sink, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	return &Sink{
		o: o, log: o.Logger, wake: make(chan struct{}, 1), kick: make(chan struct{}, 1),
		claims: make(map[port.Key][]*claim), groups: make(map[groupKey]*group), holds: make(map[*hold]struct{}),
		watched: make(map[uint16]int), dirty: make(map[port.Key]struct{}), flows: forward.NewBook(o.MaxFlows),
	}, nil
}

// Name implements reconcile.Sink.
func (s *Sink) Name() string { return Name }

// Wake implements reconcile.Sink.
func (s *Sink) Wake() <-chan struct{} { return s.wake }

func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run opens, closes and serves placeholders until ctx ends. It then closes all
// of them, cuts their flows, and waits for these.
func (s *Sink) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.mu.Lock()
	s.ctx = ctx
	s.mu.Unlock()
	defer s.wg.Wait()
	defer s.end()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		case <-s.kick:
		}
		if at := s.work(time.Now()); !at.IsZero() {
			timer.Reset(time.Until(at))
		} else {
			timer.Stop()
		}
	}
}

func (s *Sink) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for h := range s.holds {
		s.shut(h)
	}
	s.ctx = nil
}

// work looks at what is due and returns when the next is, zero for never.
func (s *Sink) work(now time.Time) (next time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for h := range s.holds {
		if !h.due.IsZero() && !h.due.After(now) {
			s.decide(h, now)
		}
		if !h.due.IsZero() && (next.IsZero() || h.due.Before(next)) {
			next = h.due
		}
	}
	if len(s.dirty) > 0 {
		poke(s.wake)
	}
	return next
}

// Sync implements reconcile.Sink. It never fails: what could not be opened is an
// outcome, and tried again by itself.
func (s *Sink) Sync(_ context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	touched := make(map[*group]struct{})
	if change.Base == s.synced && change.Base != 0 {
		for _, k := range change.Keys {
			p, ok := want.Get(k)
			s.place(k, p, ok, touched)
		}
	} else {
		for k := range s.claims {
			if _, ok := want.Get(k); !ok {
				s.place(k, port.Publication{}, false, touched)
			}
		}
		for k, p := range want.All() {
			s.place(k, p, true, touched)
		}
	}
	s.synced = want.Generation()
	now := time.Now()
	for g := range touched {
		s.assign(g, now)
	}
	out := make(port.Outcomes, len(s.dirty))
	for k := range s.dirty {
		if _, ok := want.Get(k); ok {
			out[k] = s.outcomes(k)
		}
	}
	clear(s.dirty)
	poke(s.kick)
	return out, nil
}

func (s *Sink) outcomes(k port.Key) []port.Outcome {
	out := make([]port.Outcome, 0, len(s.claims[k]))
	for _, c := range s.claims[k] {
		out = append(out, c.outcome)
	}
	return out
}

// place makes the claims of one key those of p, or none.
func (s *Sink) place(k port.Key, p port.Publication, wanted bool, touched map[*group]struct{}) {
	s.dirty[k] = struct{}{}
	old := s.claims[k]
	var next []*claim
	if wanted {
		for _, at := range p.Decision.Host {
			c := &claim{at: at, outcome: port.Outcome{Key: k, State: port.Pending, HostAddress: at}}
			if i := slices.IndexFunc(old, func(o *claim) bool { return o.at == at }); i >= 0 {
				c = old[i]
				old = slices.Delete(slices.Clone(old), i, i+1)
			}
			c.pub = p
			next = append(next, c)
		}
	}
	for _, c := range old {
		delete(c.group.claims, c)
		touched[c.group] = struct{}{}
	}
	for _, c := range next {
		if c.group == nil {
			c.group = s.groupOf(c)
			c.group.claims[c] = struct{}{}
		}
		touched[c.group] = struct{}{}
	}
	if len(next) == 0 {
		delete(s.claims, k)
		return
	}
	s.claims[k] = next
}

// Contend says that somebody wants the address of a placeholder: it is closed,
// with those of the same port beside it, and stays so for a while. v6only says
// of :: that IPv4 is not wanted. who is for people.
func (s *Sink) Contend(p port.Protocol, at netip.AddrPort, v6only bool, who string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	hit := false
	var beside []*hold
	for h := range s.holds {
		if h.open == nil || h.protocol != p || h.bound.Port() != at.Port() {
			continue
		}
		beside = append(beside, h)
		hit = hit || overlap(at.Addr(), !v6only, h.bound.Addr())
	}
	if !hit {
		return
	}
	now := time.Now()
	for _, h := range beside {
		s.yield(h, now, who)
	}
	s.stats.yields.Add(1)
	s.log.Info("released a port that somebody wants", "protocol", p, "address", at, "by", who, "for", beside[0].pause)
	poke(s.wake)
	poke(s.kick)
}

// Reset ends the flows of keys that a rule forbids. The keys must be out of the
// wanted set before.
func (s *Sink) Reset(keys []port.Key) { s.flows.Reset(ErrForbidden, keys...) }

// Stats are counts since the start, but for Open and Flows.
type Stats struct {
	Open      int    // placeholders that are open now
	Flows     int    // connections and UDP clients that are served now
	Opened    uint64 // placeholders opened
	Yields    uint64 // released because somebody wanted the port
	Conflicts uint64 // attempts at an address that is taken
	Served    uint64 // flows that ended in order
	Failed    uint64 // flows that did not
	OverLimit uint64 // connections refused because of MaxFlows
}

type counters struct {
	opened, yields, conflicts, served, failed, overLimit atomic.Uint64
	open                                                 atomic.Int64
}

// Stats returns the counts.
func (s *Sink) Stats() Stats {
	c := &s.stats
	return Stats{
		Open: int(c.open.Load()), Flows: s.flows.Len(), Opened: c.opened.Load(), Yields: c.yields.Load(),
		Conflicts: c.conflicts.Load(), Served: c.served.Load(), Failed: c.failed.Load(), OverLimit: c.overLimit.Load(),
	}
}

// String names a placeholder for people.
func (h *hold) String() string { return fmt.Sprintf("%s %s", h.protocol, h.at) }
