// SPDX-License-Identifier: Apache-2.0

// Package hostlink is the sink that publishes through a link to a host peer:
// it keeps the host's set equal to the wanted one, returns the outcome of each
// publication, and authorises the flows that the host opens.
package hostlink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/forward"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/wire"
)

// Acceptor is where sessions come from: a link.Listener, or a link.Redialer
// where the agent dials.
type Acceptor interface {
	// Accept waits for the next proved session. An error ends Run.
	Accept(ctx context.Context) (link.Session, error)
}

// Options configures a Sink. Epoch, Lookup, Serve, ServeUDP and Logger are
// required.
type Options struct {
	// Epoch names one life of the agent, at most 64 bytes: the link's identity.
	Epoch string
	// Lookup returns a publication of the current wanted set (reconcile.Reconciler's
	// Wanted), not of the last one that was synced: no flow may be opened to what a
	// rule has just denied.
	Lookup func(port.Key) (port.Publication, bool)
	// Incomplete, if not nil, returns the sources whose ports a generation of the wanted set
	// may lack, because they have not reported yet (reconcile.Reconciler's Incomplete). Sync
	// is called again when that changes. The host is sent the names, and keeps the ports of
	// the session before until it is sent a set without any.
	Incomplete func(generation uint64) []string
	// Serve moves the bytes of one flow until it ends. It answers req, owns stream,
	// and has closed or reset it when it returns. The end of ctx resets the flow;
	// context.Cause is why.
	Serve func(ctx context.Context, stream net.Conn, req forward.Request) error
	// ServeUDP is Serve for the datagrams of one client.
	ServeUDP func(ctx context.Context, client forward.Datagrams, req forward.Request) error
	// MaxFlows bounds the flows of each protocol at one time; 10,240 if 0. The link must allow
	// some more streams, on which the limit is reported to the host.
	MaxFlows int
	// RequestTimeout bounds the wait for the request of a flow; 5 s if 0.
	RequestTimeout time.Duration
	// Patience is how long a host may acknowledge nothing of what was sent until its
	// session is closed; 60 s if 0. Until then its publications are pending.
	Patience time.Duration
	// Unpublished are all ports of the guest with the decisions about them. Those that are
	// not allowed are reported to the host, for display. Nil reports none.
	Unpublished *table.Table[port.Key, port.Publication]
	// Unread, if not nil, returns the NAT rules that are not understood, which are reported
	// with these ports: at the start of a session, and when UnreadChanged receives.
	Unread        func() []wire.Unread
	UnreadChanged schedule.Signal
	Logger        *slog.Logger

	maxPublications int // wire.MaxPublications if 0
	maxUnpublished  int // wire.MaxUnpublished if 0
}

func (o Options) complete() (Options, error) {
	switch {
	case o.Epoch == "" || len(o.Epoch) > wire.MaxWord:
		return o, fmt.Errorf("hostlink options: Epoch of %d bytes: want 1 to %d", len(o.Epoch), wire.MaxWord)
	case o.Lookup == nil || o.Serve == nil || o.ServeUDP == nil || o.Logger == nil:
		return o, errors.New("hostlink options: Lookup, Serve, ServeUDP and Logger are required")
	case o.MaxFlows < 0 || o.RequestTimeout < 0 || o.Patience < 0:
		return o, errors.New("hostlink options: MaxFlows, RequestTimeout and Patience: want 0 for the default, or more")
	}
	if o.MaxFlows == 0 {
		o.MaxFlows = 10_240
	}
	if o.RequestTimeout == 0 {
		o.RequestTimeout = 5 * time.Second
	}
	if o.Patience == 0 {
		o.Patience = time.Minute
	}
	if o.maxUnpublished == 0 {
		o.maxUnpublished = wire.MaxUnpublished
	}
	if o.maxPublications == 0 {
		o.maxPublications = wire.MaxPublications
	}
	return o, nil
}

// Why a flow is reset by us; context.Cause of Serve's context.
var (
	ErrCut  = errors.New("the port is no longer allowed")
	ErrLost = errors.New("the link to the host is lost")
)

// Sink publishes through sessions with a host. At most one is active: the
// newest proved host takes over. It implements reconcile.Sink.
type Sink struct {
	o      Options
	log    *slog.Logger
	accept Acceptor
	wake   schedule.Signal
	stats  counters

	syncing sync.Mutex // held by Sync

	flows *forward.Book

	mu     sync.Mutex
	rivals rivals
	cur    *session // the active one, nil if none
	idle   bool     // every key was returned as pending since the last session ended
}

// New returns a sink for the sessions of accept. It starts nothing: see Run.
func New(accept Acceptor, o Options) (*Sink, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	return &Sink{o: o, log: o.Logger, accept: accept, wake: schedule.NewSignal(), flows: forward.NewBook(o.MaxFlows)}, nil
}

// Name implements reconcile.Sink.
func (s *Sink) Name() string { return "hostlink" }

// Wake implements reconcile.Sink.
func (s *Sink) Wake() <-chan struct{} { return s.wake }

// Run takes sessions and serves their flows until ctx ends or no more sessions
// can come. It then closes the session and waits for all flows to end.
func (s *Sink) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() { s.passOn(ctx, s.o.UnreadChanged, func(c *session) { c.unread.Notify() }) })
	for {
		ls, err := s.accept.Accept(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("hostlink: %w", err)
		}
		sess := newSession(ls, &s.stats, s.o, s.wake)
		old, again := s.replace(sess)
		s.stats.sessions.Add(1)
		p := ls.Peer()
		s.log.Info("host connected", "host", p.Name, "version", p.Version, "identity", p.Identity, "address", p.Address, "proof", p.Proof)
		if old != nil {
			s.stats.replaced.Add(1)
			if again {
				s.log.Warn("two hosts take this agent from each other; it serves one at a time", "host", p.Name, "other", old.Peer().Name)
			}
			wg.Go(func() { _ = old.CloseWith(link.ReasonReplaced) })
		}
		wg.Go(func() { s.serve(ctx, sess) })
		s.wake.Notify()
	}
}

// replace makes a session the active one. It returns the one before, nil if there
// was none, and whether that host had taken over from this one earlier.
func (s *Sink) replace(sess *session) (old *session, again bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, s.cur = s.cur, sess
	if old != nil {
		again = s.rivals.takeover(old.Peer(), sess.Peer(), time.Now())
	}
	return old, again
}

// serve runs one session to its end.
func (s *Sink) serve(ctx context.Context, sess *session) {
	var wg sync.WaitGroup
	fctx, reset := context.WithCancelCause(ctx)
	wg.Go(func() { s.read(sess) })
	wg.Go(func() { s.acceptFlows(fctx, sess) })
	wg.Go(func() { s.reportUnpublished(fctx, sess) })
	select {
	case <-ctx.Done():
	case <-sess.Done():
	}
	_ = sess.CloseWith(link.ReasonShutdown) // no-op if it ended
	reset(ErrLost)
	s.drop(sess)
	wg.Wait()
	s.log.Info("host disconnected", "host", sess.Peer().Name, "identity", sess.Peer().Identity, "why", sess.Err())
	s.wake.Notify()
}

// drop forgets a session that ended.
func (s *Sink) drop(sess *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cur == sess {
		s.cur, s.idle = nil, false
	}
}

// Peer returns the host of the active session.
func (s *Sink) Peer() (link.Peer, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cur == nil {
		return link.Peer{}, false
	}
	return s.cur.Peer(), true
}

// Sync implements reconcile.Sink. Without a host all is pending, which is no
// error: Wake receives when one connects. A host that has not acknowledged when
// ctx reaches its deadline is an error, and the next Sync continues to wait.
func (s *Sink) Sync(ctx context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	s.syncing.Lock()
	defer s.syncing.Unlock()
	for {
		s.mu.Lock()
		sess := s.cur
		s.mu.Unlock()
		if sess == nil {
			return s.pending(want, change), nil
		}
		out, err := sess.sync(ctx, want, change)
		if !errors.Is(err, errGone) {
			return out, err
		}
		s.drop(sess)
		if ctx.Err() != nil {
			return s.pending(want, change), nil // a host that connected meanwhile has woken us
		}
	}
}

// pending returns the outcomes when there is no host: of every key once after a
// session ended, then of those that change.
func (s *Sink) pending(want reconcile.View, change reconcile.Change) port.Outcomes {
	s.mu.Lock()
	idle := s.idle
	s.idle = s.cur == nil
	s.mu.Unlock()
	out := make(port.Outcomes)
	add := func(k port.Key) {
		out[k] = []port.Outcome{{Key: k, State: port.Pending, Reason: port.Because(port.NoHost)}}
	}
	if !idle {
		for k := range want.All() {
			add(k)
		}
		return out
	}
	for _, k := range change.Keys {
		if _, ok := want.Get(k); ok {
			add(k)
		}
	}
	return out
}

// counters are what Stats reads.
type counters struct {
	sessions, replaced, silent                    atomic.Uint64
	framesIn, framesOut, bytesIn, bytesOut        atomic.Uint64
	malformed, stray, resyncs, snapshots, changes atomic.Uint64
	flows                                         [len(flowResults)]atomic.Uint64
	open                                          atomic.Int64
}

// Stats are counts since the start, but for Connected and FlowsOpen.
type Stats struct {
	Connected bool
	Rivals    []string // names of two hosts that take the agent from each other, nil if there are none
	Sessions  uint64   // sessions begun
	Replaced  uint64   // sessions closed because a newer host came
	Silent    uint64   // sessions closed because the host took too long to answer
	FramesIn  uint64   // control messages from hosts, whole ones
	FramesOut uint64   // control messages to hosts
	BytesIn   uint64   // of the control streams
	BytesOut  uint64
	Malformed uint64 // control messages that were dropped
	Stray     uint64 // outcomes of keys that were never sent, dropped
	Resyncs   uint64 // snapshots that hosts asked for
	Snapshots uint64 // snapshots sent
	Changes   uint64 // changes sent
	FlowsOpen int
	Flows     map[string]uint64 // flows that ended, by result: see the Flow constants
}

// Stats returns the counts.
func (s *Sink) Stats() Stats {
	s.mu.Lock()
	connected, names := s.cur != nil, s.rivals.current(time.Now())
	s.mu.Unlock()
	c := &s.stats
	st := Stats{
		Connected: connected, Rivals: names, Sessions: c.sessions.Load(), Replaced: c.replaced.Load(), Silent: c.silent.Load(),
		FramesIn: c.framesIn.Load(), FramesOut: c.framesOut.Load(), BytesIn: c.bytesIn.Load(), BytesOut: c.bytesOut.Load(),
		Malformed: c.malformed.Load(), Stray: c.stray.Load(), Resyncs: c.resyncs.Load(),
		Snapshots: c.snapshots.Load(), Changes: c.changes.Load(),
		FlowsOpen: int(c.open.Load()), Flows: make(map[string]uint64, len(flowResults)),
	}
	for i, name := range flowResults {
		st.Flows[name] = c.flows[i].Load()
	}
	return st
}
