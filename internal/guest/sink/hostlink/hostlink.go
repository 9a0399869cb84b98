// SPDX-License-Identifier: Apache-2.0

// Package hostlink is the sink that publishes through a link to a host peer:
// it keeps the host's set equal to the wanted one, records the outcome of each
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

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/replica"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/port/table"
)

// Acceptor is where sessions come from: a link.Listener, or a link.Redialer
// where the agent dials.
type Acceptor interface {
	// Accept waits for the next proved session. An error ends Run.
	Accept(ctx context.Context) (link.Session, error)
}

// Options configures a Sink. Lookup, Serve, ServeUDP and Logger are required.
type Options struct {
	// Lookup returns a publication of the current wanted set (reconcile.Reconciler's
	// Wanted), not of the last one that the host has seen: no flow may be opened to what a
	// rule has just denied.
	Lookup func(port.Key) (port.Publication, bool)
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
	// session is closed; 60 s if 0. Until then what it has not answered is pending.
	Patience time.Duration
	// Unpublished are all ports of the guest with the decisions about them. Those that are
	// not allowed are reported to the host, for display. Nil reports none.
	Unpublished *table.Table[port.Key, port.Publication]
	// Unread, if not nil, returns the NAT rules that are not understood, which are reported
	// with these ports: at the start of a session, and when UnreadChanged receives.
	Unread        func() []wire.Unread
	UnreadChanged schedule.Signal
	Logger        *slog.Logger

	maxPublications int // that of the table if 0
	maxUnpublished  int // that of the table if 0
}

func (o Options) complete() (Options, error) {
	switch {
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
	if o.Unpublished == nil {
		o.Unpublished = table.New[port.Key, port.Publication](port.Key.Compare)
	}
	return o, nil
}

// Why a flow is reset by us; context.Cause of Serve's context.
var (
	ErrCut  = errors.New("the port is no longer allowed")
	ErrLost = errors.New("the link to the host is lost")
)

// Sink publishes through sessions with a host. At most one is active: the
// newest proved host takes over. It implements reconcile.Follower.
type Sink struct {
	o       Options
	log     *slog.Logger
	accept  Acceptor
	changed schedule.Signal // a session began or ended
	stats   counters
	flows   *forward.Book
	unread  *table.Table[wire.Unread, wire.Unread]

	followed chan struct{} // closed when record is set
	record   *reconcile.Record

	mu     sync.Mutex // also held while the record is written
	rivals rivals
	cur    *session // the active one, nil if none
}

// New returns a sink for the sessions of accept. It starts nothing: see Run.
func New(accept Acceptor, o Options) (*Sink, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	return &Sink{
		o: o, log: o.Logger, accept: accept, changed: schedule.NewSignal(), flows: forward.NewBook(o.MaxFlows),
		unread: table.New[wire.Unread, wire.Unread](wire.Unread.Compare), followed: make(chan struct{}),
	}, nil
}

// Name implements reconcile.Follower.
func (s *Sink) Name() string { return "hostlink" }

// Follow implements reconcile.Follower. Without a host all is pending.
func (s *Sink) Follow(ctx context.Context, r *reconcile.Record) {
	s.record = r
	close(s.followed)
	select {
	case <-ctx.Done():
		return
	case <-r.Begun():
		s.look()
	}
	complete := r.Complete()
	for {
		s.alone(ctx)
		select {
		case <-ctx.Done():
			return
		case <-s.changed:
		case <-complete:
			complete = nil
			s.look()
		}
	}
}

// look has the session look whether there is more to send, if there is one.
func (s *Sink) look() {
	s.mu.Lock()
	sess := s.cur
	s.mu.Unlock()
	if sess != nil {
		sess.tables.Changed()
	}
}

// alone records that all is pending, until there is a host.
func (s *Sink) alone(ctx context.Context) {
	sub := s.record.Wanted().Subscribe()
	defer sub.Close()
	others := s.record.Keys()
	for {
		view, change := sub.Take()
		if !s.pend(view, append(change.Keys, others...)) {
			return
		}
		others = nil
		select {
		case <-ctx.Done():
			return
		case <-s.changed:
		case <-sub.C():
		}
	}
}

// pend records that keys are pending, as far as they are wanted, if there is no host. Nothing
// more can be done for them then.
func (s *Sink) pend(want reconcile.View, keys []port.Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cur != nil {
		return false
	}
	s.record.Update(func(x *reconcile.RecordTx) {
		for _, k := range keys {
			if want.Has(k) {
				x.Set(k, pending(port.NoHost))
			} else {
				x.Set(k)
			}
		}
	})
	s.record.InSync(nil)
	return true
}

func pending(why port.Code) port.Outcome {
	return port.Outcome{State: port.Pending, Reason: port.Because(why)}
}

// Run takes sessions and serves their flows until ctx ends or no more sessions
// can come. It then closes the session and waits for all flows to end.
func (s *Sink) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() { s.followUnread(ctx) })
	for {
		ls, err := s.accept.Accept(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("hostlink: %w", err)
		}
		sess := newSession(s, ls)
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
		s.changed.Notify()
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
	wg.Go(func() { s.exchange(fctx, sess) })
	wg.Go(func() { s.acceptFlows(fctx, sess) })
	select {
	case <-ctx.Done():
	case <-sess.Done():
	}
	_ = sess.CloseWith(link.ReasonShutdown) // no-op if it ended
	reset(ErrLost)
	s.drop(sess)
	wg.Wait()
	s.log.Info("host disconnected", "host", sess.Peer().Name, "identity", sess.Peer().Identity, "why", sess.Err())
}

// drop forgets a session that ended.
func (s *Sink) drop(sess *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cur == sess {
		s.cur = nil
		s.changed.Notify()
	}
}

// followUnread keeps the table of NAT rules that are not understood until ctx ends.
func (s *Sink) followUnread(ctx context.Context) {
	for s.o.Unread != nil {
		now := make(map[wire.Unread]struct{})
		for _, r := range s.o.Unread() {
			now[r] = struct{}{}
		}
		view := s.unread.View()
		s.unread.Update(func(tx *table.Tx[wire.Unread, wire.Unread]) {
			for r := range view.All() {
				if _, ok := now[r]; !ok {
					tx.Delete(r)
				}
			}
			for r := range now {
				if !view.Has(r) {
					tx.Put(r, r)
				}
			}
		})
		if schedule.Wait(ctx, time.Time{}, s.o.UnreadChanged) != nil {
			return
		}
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

// counters are what Stats reads.
type counters struct {
	sessions, replaced, silent, stray atomic.Uint64
	tables                            replica.Stats
	flows                             [len(flowResults)]atomic.Uint64
	open                              atomic.Int64
}

// Stats are counts since the start, but for Connected and FlowsOpen.
type Stats struct {
	FlowsOpen int
	Flows     map[string]uint64 `metric:"flows_total" label:"result=served; failed; cut; lost; forbidden; limit; malformed; timeout" help:"Ended flows by result. Every result except \x60served\x60 is an error."`
	Rivals    []string          // names of two hosts that take the agent from each other, nil if there are none
	Connected bool              `metric:"link_connected" help:"1 while a host is connected."`
	Sessions  uint64            `metric:"link_sessions_total" help:"Sessions established with a host."`
	Replaced  uint64            `metric:"link_sessions_closed_total" label:"reason=replaced by a newer host" help:"Sessions that the agent ended."`
	Silent    uint64            `metric:"link_sessions_closed_total" label:"reason=silent host"`
	FramesIn  uint64            `metric:"link_messages_total" label:"direction=in" help:"Control messages by direction."`
	FramesOut uint64            `metric:"link_messages_total" label:"direction=out"`
	BytesIn   uint64            `metric:"link_bytes_total" label:"direction=in" help:"Bytes of control messages by direction."`
	BytesOut  uint64            `metric:"link_bytes_total" label:"direction=out"`
	Malformed uint64            `metric:"link_rejected_total" label:"reason=malformed message" help:"Rejected input from a host."`
	Stray     uint64            `metric:"link_rejected_total" label:"reason=stray outcome for a key that was never sent"`
	Snapshots uint64            `metric:"link_updates_total" label:"kind=snapshot sent" help:"Updates sent to the host, and resyncs it requested."`
	Changes   uint64            `metric:"link_updates_total" label:"kind=change sent"`
	Resyncs   uint64            `metric:"link_updates_total" label:"kind=resync requested"`
}

// Stats returns the counts.
func (s *Sink) Stats() Stats {
	s.mu.Lock()
	connected, names := s.cur != nil, s.rivals.current(time.Now())
	s.mu.Unlock()
	c, t := &s.stats, &s.stats.tables
	st := Stats{
		Connected: connected, Rivals: names, Sessions: c.sessions.Load(), Replaced: c.replaced.Load(), Silent: c.silent.Load(),
		FramesIn: t.FramesIn.Load(), FramesOut: t.FramesOut.Load(), BytesIn: t.BytesIn.Load(), BytesOut: t.BytesOut.Load(),
		Malformed: t.Malformed.Load(), Stray: c.stray.Load(), Resyncs: t.Resyncs.Load(),
		Snapshots: t.Snapshots.Load(), Changes: t.Changes.Load(),
		FlowsOpen: int(c.open.Load()), Flows: make(map[string]uint64, len(flowResults)),
	}
	for i, name := range flowResults {
		st.Flows[name] = c.flows[i].Load()
	}
	return st
}
