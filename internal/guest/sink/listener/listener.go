// SPDX-License-Identifier: Apache-2.0

// Package listener is the sink that opens listeners in the guest for publications
// without a socket of their own, so that a relay which forwards the guest's
// listeners (WSL's localhost relay) sees them too. Connections to such a
// placeholder are carried to the publication's dial targets.
//
// A placeholder does not keep a server from its port. It opens only if no server
// did within the settle time, never shares a port, and is closed when a server
// tries to bind the port.
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

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/compact"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Name is the sink's name in the configuration and in status.
const Name = "listener"

const (
	conflictFirst = 250 * time.Millisecond // between attempts at an address that is taken
	conflictMax   = 10 * time.Second
	failureMax    = 30 * time.Second // the same at one that cannot be had

	// The same at a wildcard, while narrower addresses of its server are open: these
	// are closed for a moment each time.
	besideFirst = 30 * time.Second
	besideMax   = 10 * time.Minute

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
	// reset it when it returns. The end of ctx resets it.
	Serve func(ctx context.Context, conn net.Conn, pub port.Publication) error
	// ServeUDP carries the datagrams of one client, and owns client. Without it UDP
	// is not served.
	ServeUDP func(ctx context.Context, client forward.Datagrams, req forward.Request) error
	// Sockets returns all publications of a port, also those that rules deny: the
	// holder of the port is among them.
	Sockets func(port.Slot) []port.Publication
	// Watch, if not nil, is called with the ports at which placeholders are open, or
	// about to be, so that Contend is called when a program tries to bind one. It
	// must not call back.
	Watch func(port uint16, on bool)
	// Keep, if not nil, is called with the addresses of TCP placeholders as they open
	// and close, to exempt connections to them from NAT. It must not call back.
	Keep func(at netip.AddrPort, on bool)
	// Settle is how long a publication must be without a socket of its own before
	// a placeholder opens; 750 ms if 0.
	Settle time.Duration
	// ProxySettle is the same for a rule that an engine writes before it starts a
	// proxy of its own, until the engine reports that the container runs; 10 s if 0.
	ProxySettle time.Duration
	// MaxFlows bounds the flows of each protocol at one time; 10,240 if 0.
	MaxFlows int
	Logger   *slog.Logger
}

func (o Options) complete() (Options, error) {
	switch {
	case o.Network == nil || o.Serve == nil || o.Sockets == nil || o.Logger == nil:
		return o, errors.New("listener options: Network, Serve, Sockets and Logger are required")
	case o.Settle < 0 || o.ProxySettle < 0 || o.MaxFlows < 0:
		return o, errors.New("listener options: Settle, ProxySettle and MaxFlows: want 0 for the default, or more")
	}
	if o.Settle == 0 {
		o.Settle = 750 * time.Millisecond
	}
	if o.ProxySettle == 0 {
		o.ProxySettle = 10 * time.Second
	}
	o.ProxySettle = max(o.ProxySettle, o.Settle)
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

// ErrForbidden is the context.Cause of a flow that a rule forbids.
var ErrForbidden = errors.New("the port is no longer allowed")

// Sink keeps placeholders. It implements reconcile.Sink.
type Sink struct {
	o        Options
	log      *slog.Logger
	wake     schedule.Signal // to the reconciler
	timers   schedule.Signal // to Run: something may be due
	acceptor *own.Acceptor
	stats    counters
	wg       sync.WaitGroup // of accept loops and flows

	mu           sync.Mutex
	ctx          context.Context //nolint:containedctx // of Run: what it owns outlives the Sync that asked for it
	synced       uint64
	claims       map[port.Key][]*claim
	groups       map[groupKey]*group
	placeholders map[*placeholder]struct{}
	due          schedule.Deadlines[*placeholder]
	watched      map[uint16]int
	dirty        map[port.Key]struct{} // whose outcomes changed
	flows        *forward.Book
	peak         compact.Peak // of claims
}

// New returns a sink. It opens nothing before Run.
func New(o Options) (*Sink, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	return &Sink{
		o: o, log: o.Logger, acceptor: own.NewAcceptor(o.Logger, own.ForFlow), wake: schedule.NewSignal(), timers: schedule.NewSignal(),
		claims: make(map[port.Key][]*claim), groups: make(map[groupKey]*group), placeholders: make(map[*placeholder]struct{}),
		watched: make(map[uint16]int), dirty: make(map[port.Key]struct{}), flows: forward.NewBook(o.MaxFlows),
	}, nil
}

// Name implements reconcile.Sink.
func (s *Sink) Name() string { return Name }

// Wake implements reconcile.Sink.
func (s *Sink) Wake() <-chan struct{} { return s.wake }

// Run opens, closes and serves placeholders until ctx ends. It then closes all of
// them, resets their flows, and waits for these to end.
func (s *Sink) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.mu.Lock()
	s.ctx = ctx
	s.mu.Unlock()
	defer s.wg.Wait()
	defer s.end()
	for {
		if err := schedule.Wait(ctx, s.updateDue(time.Now()), s.timers); err != nil {
			return err
		}
	}
}

func (s *Sink) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for h := range s.placeholders {
		s.shut(h)
	}
	s.ctx = nil
}

// updateDue updates what is due, and returns when the next is, zero for never.
func (s *Sink) updateDue(now time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.due.TakeAll(now) {
		if _, given := s.placeholders[h]; given { // else it was closed for another one just now
			s.again(h, now)
		}
	}
	if len(s.dirty) > 0 {
		s.wake.Notify()
	}
	return s.due.Next()
}

// Sync implements reconcile.Sink. It never fails: a placeholder that could not be
// opened is an outcome, and is retried by the sink.
func (s *Sink) Sync(_ context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	touched := make(map[*group]struct{})
	if change.Base == s.synced && change.Base != 0 {
		for _, k := range change.Keys {
			p, ok := want.Get(k)
			s.setClaims(k, p, ok, touched)
		}
	} else {
		for k := range s.claims {
			if _, ok := want.Get(k); !ok {
				s.setClaims(k, port.Publication{}, false, touched)
			}
		}
		for k, p := range want.All() {
			s.setClaims(k, p, true, touched)
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
	s.dirty = compact.Clear(s.dirty)
	s.shrink()
	s.timers.Notify()
	return out, nil
}

// shrink makes the maps anew if most of what was wanted is gone.
func (s *Sink) shrink() {
	if s.peak.Passed(len(s.claims)) {
		s.claims, s.groups = compact.Map(s.claims), compact.Map(s.groups)
		s.placeholders, s.watched = compact.Map(s.placeholders), compact.Map(s.watched)
	}
}

func (s *Sink) outcomes(k port.Key) []port.Outcome {
	out := make([]port.Outcome, 0, len(s.claims[k]))
	for _, c := range s.claims[k] {
		out = append(out, c.outcome)
	}
	return out
}

// setClaims makes the claims of one key those of p, or none.
func (s *Sink) setClaims(k port.Key, p port.Publication, wanted bool, touched map[*group]struct{}) {
	s.dirty[k] = struct{}{}
	old := s.claims[k]
	var next []*claim
	if wanted {
		for _, at := range p.Decision.Host {
			c := &claim{at: at, outcome: port.Outcome{State: port.Pending, HostAddress: at}}
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

// Contend notes that a program was refused the address of a placeholder. All
// placeholders of that port are closed for a while. v6only says of :: that IPv4 is
// not wanted. who describes the program.
func (s *Sink) Contend(p port.Protocol, at netip.AddrPort, v6only bool, who string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	hit := false
	var beside []*placeholder
	for h := range s.placeholders {
		if h.listener == nil || h.protocol != p || h.bound.Port() != at.Port() {
			continue
		}
		beside = append(beside, h)
		both := at.Addr() == netip.IPv6Unspecified() && !v6only
		hit = hit || both || overlap(at.Addr(), h.bound.Addr())
	}
	if !hit {
		return
	}
	now := time.Now()
	for _, h := range beside {
		s.yield(h, now, who)
	}
	s.stats.yields.Add(1)
	s.log.Info("released a port for a program that wants it", "protocol", p, "address", at, "program", who,
		"for", beside[0].until.Sub(now))
	s.wake.Notify()
	s.timers.Notify()
}

// Reset resets the flows of keys that a rule forbids. The keys must have left the
// wanted set before.
func (s *Sink) Reset(keys []port.Key) { s.flows.Reset(ErrForbidden, keys...) }

// Stats are counts since the start, but for Open and Flows. OverLimit counts connections
// that were refused because of MaxFlows, or because too few file descriptors were left.
type Stats struct {
	Open      int    `metric:"listener_placeholders" help:"Currently open placeholders of the listener sink."`
	Opened    uint64 `metric:"listener_placeholders_total" label:"result=opened" help:"Placeholders by what happened to them."`
	Yields    uint64 `metric:"listener_placeholders_total" label:"result=yielded to a server that wanted the port"`
	Conflicts uint64 `metric:"listener_placeholders_total" label:"result=conflict: the address was in use"`
	Flows     int    `metric:"listener_flows_open" help:"Current flows of placeholders."`
	Served    uint64 `metric:"listener_flows_total" label:"result=served" help:"Flows of placeholders by result."`
	Failed    uint64 `metric:"listener_flows_total" label:"result=failed"`
	OverLimit uint64 `metric:"listener_flows_total" label:"result=limit"`
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
		Conflicts: c.conflicts.Load(), Served: c.served.Load(), Failed: c.failed.Load(), OverLimit: c.overLimit.Load() + s.acceptor.Refused(),
	}
}

// String returns the protocol and address of a placeholder.
func (h *placeholder) String() string { return fmt.Sprintf("%s %s", h.protocol, h.at) }
