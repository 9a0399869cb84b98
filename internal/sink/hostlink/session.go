// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/wire"
)

// maxOutcomes is how many outcomes of one key are kept: two for each host address
// that it can ask for.
const maxOutcomes = 2 * wire.MaxHosts

// errGone means that the session ended during a sync.
var errGone = errors.New("session gone")

// session is one host, with what was sent to it and what it answered.
type session struct {
	link.Session
	o        Options
	stats    *counters
	in       io.Reader
	received schedule.Signal // the host sent something
	wake     schedule.Signal // asks for a Sync
	unread   schedule.Signal // the NAT rules that are not understood may have changed
	lost     schedule.Signal // the host may have lost a part of the report of unpublished ports

	writing sync.Mutex // held while a message is written, with all its parts

	mu         sync.Mutex
	started    bool // a snapshot was sent
	sent       uint64
	ackedGen   uint64    // the newest generation that is acknowledged
	progress   time.Time // when something was sent with nothing outstanding, or the newest Ack since
	acked      bool      // sent is acknowledged
	view       reconcile.View
	partial    bool                  // view has more than can be sent to a host
	incomplete bool                  // the host was last sent a snapshot that may lack ports
	unanswered map[port.Key]struct{} // sent, and no outcome since
	outcomes   port.Outcomes         // received since the last sync took them
	resync     bool
	syncing    bool
	malformed  *rate.Limiter
	resyncs    *rate.Limiter
}

func newSession(ls link.Session, stats *counters, o Options, wake schedule.Signal) *session {
	return &session{
		Session: ls, o: o, stats: stats, wake: wake,
		in:         bufio.NewReader(countReader{ls.Control(), stats}),
		received:   schedule.NewSignal(),
		unread:     schedule.NewSignal(),
		lost:       schedule.NewSignal(),
		unanswered: make(map[port.Key]struct{}), outcomes: make(port.Outcomes),
		malformed: rate.NewLimiter(rate.Every(time.Second), 64),
		resyncs:   rate.NewLimiter(rate.Every(10*time.Second), 16),
	}
}

type countReader struct {
	io.Reader
	stats *counters
}

func (r countReader) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	r.stats.bytesIn.Add(uint64(n))
	return n, err
}

// sync brings the host to want and returns its outcomes. errGone means that the
// session ended.
func (c *session) sync(ctx context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	c.setSyncing(true)
	failed := make(port.Outcomes)
	out, err := c.exchange(ctx, want, change, failed)
	if out != nil {
		maps.Copy(out, failed)
	}
	c.setSyncing(false)
	return out, err
}

func (c *session) setSyncing(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.syncing = on
	if !on && (len(c.outcomes) > 0 || c.resync) {
		c.wake.Notify() // they came after we looked
	}
}

func (c *session) exchange(ctx context.Context, want reconcile.View, change reconcile.Change, failed port.Outcomes) (port.Outcomes, error) {
	for {
		if err := c.send(ctx, want, change, failed); err != nil {
			return c.broken(ctx, err)
		}
		if out, ok := c.answer(); ok {
			return out, nil
		}
		select {
		case <-c.received:
		case <-c.Done():
			return nil, errGone
		case <-ctx.Done():
			return c.late(ctx, want, change)
		}
	}
}

// broken ends a session on which a message was sent in part.
func (c *session) broken(ctx context.Context, err error) (port.Outcomes, error) {
	select {
	case <-c.Done():
		return nil, errGone
	default:
	}
	reason := link.ReasonProtocol // the control stream alone was closed
	if errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(ctx.Err(), context.Canceled) {
		reason = link.ReasonSilent
		c.stats.silent.Add(1)
	}
	_ = c.CloseWith(reason)
	if errors.Is(ctx.Err(), context.Canceled) {
		return nil, fmt.Errorf("send to host: %w", err)
	}
	return nil, errGone
}

// late is the end of ctx before the host has answered. That alone does not end
// the session: a host may be suspended for a while, and its flows would be lost.
// Pings find out whether the host is still there; Patience bounds the rest.
func (c *session) late(ctx context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return nil, ctx.Err()
	}
	c.mu.Lock()
	hopeless := time.Since(c.progress) > c.o.Patience
	c.mu.Unlock()
	if hopeless {
		c.stats.silent.Add(1)
		_ = c.CloseWith(link.ReasonSilent)
		return nil, errGone
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.take()
	for _, k := range change.Keys {
		if _, waits := c.unanswered[k]; waits {
			if _, ok := want.Get(k); ok {
				out[k] = []port.Outcome{{Key: k, State: port.Pending, Reason: port.Because(port.Unanswered)}}
			}
		}
	}
	return out, fmt.Errorf("%w: host has not acknowledged generation %d yet", reconcile.ErrPending, c.sent)
}

// answer returns the host's outcomes once it acknowledged all that was sent.
func (c *session) answer() (port.Outcomes, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.acked || c.resync {
		return nil, false
	}
	for k := range c.unanswered {
		c.outcomes[k] = []port.Outcome{{Key: k, State: port.Pending, Reason: port.Because(port.Unstatement)}}
	}
	c.unanswered = make(map[port.Key]struct{}) // a cleared map would keep the room of a snapshot
	return c.take(), true
}

// take returns the outcomes that were received. c.mu is held.
func (c *session) take() port.Outcomes {
	out := c.outcomes
	c.outcomes = make(port.Outcomes)
	return out
}

// sendTimeout bounds how long the host may take no bytes of a message: as long as
// it has for the answer to a ping.
const sendTimeout = 30 * time.Second

// send sends what the host does not have yet: all of want, the change, or nothing.
// What cannot be sent goes into failed. A message is sent to its end even if ctx
// reaches its deadline, since the session is of no use after half of one.
func (c *session) send(ctx context.Context, want reconcile.View, change reconcile.Change, failed port.Outcomes) error {
	gen := want.Generation()
	var missing wire.List[string]
	if c.o.Incomplete != nil {
		missing = wire.FitSources(c.o.Incomplete(gen))
	}
	c.mu.Lock()
	var parts []wire.Control
	switch {
	case !c.started || c.resync || (c.incomplete && len(missing) == 0) || (gen != c.sent && (change.Base == 0 || change.Base > c.sent ||
		c.partial || want.Len() > c.o.maxPublications)):
		parts = c.snapshot(want, missing, failed)
		c.stats.snapshots.Add(1)
	case gen == c.sent:
		c.mu.Unlock()
		return nil
	default:
		// The hint names what changed since Base. The host has Base or a later
		// generation, so that it differs from want in these keys at most.
		parts = c.change(want, change, failed)
		c.stats.changes.Add(1)
	}
	if c.acked || !c.started {
		c.progress = time.Now()
	}
	// Before the first byte leaves: the answer may arrive before Write returns.
	c.started, c.sent, c.acked, c.resync, c.view = true, gen, false, false, want
	c.mu.Unlock()

	control := c.Control()
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			_ = control.SetWriteDeadline(time.Unix(1, 0))
		}
	})
	defer stop()
	return c.write(ctx, parts)
}

// write writes one message to its end, unless ctx is canceled or the session ends.
func (c *session) write(ctx context.Context, parts []wire.Control) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	control := c.Control()
	w := countWriter{control, c.stats}
	for _, p := range parts {
		if err := control.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
			return err
		}
		if err := ctx.Err(); errors.Is(err, context.Canceled) { // its deadline was overwritten
			return err
		}
		if err := wire.WriteControl(w, p); err != nil {
			return err
		}
		c.stats.framesOut.Add(1)
	}
	return nil
}

type countWriter struct {
	io.Writer
	stats *counters
}

func (w countWriter) Write(b []byte) (int, error) {
	n, err := w.Writer.Write(b)
	w.stats.bytesOut.Add(uint64(n))
	return n, err
}

// snapshot is all of want that can be sent to a host. missing are the sources whose ports
// it may lack. c.mu is held.
func (c *session) snapshot(want reconcile.View, missing wire.List[string], failed port.Outcomes) []wire.Control {
	s := wire.Snapshot{
		Epoch: c.o.Epoch, Generation: want.Generation(), Incomplete: missing,
		Publications: make([]wire.Publication, 0, min(want.Len(), c.o.maxPublications)),
	}
	c.incomplete = len(missing) > 0
	c.unanswered = make(map[port.Key]struct{}, want.Len())
	c.partial = false
	text := 0
	for k, p := range want.All() {
		w := wire.FromPublication(p)
		err := w.Check()
		if err == nil && (len(s.Publications) == c.o.maxPublications || text+w.TextBytes() > wire.MaxSetBytes) {
			c.partial = true
			err = fmt.Errorf("more than %d publications, or than %d MiB of names and labels", c.o.maxPublications, wire.MaxSetBytes>>20)
		}
		if err != nil {
			failed[k] = unsendable(k, err)
			continue
		}
		text += w.TextBytes()
		s.Publications = append(s.Publications, w)
		c.unanswered[k] = struct{}{}
	}
	return s.Split()
}

// change is what differs from what was sent last. c.mu is held.
func (c *session) change(want reconcile.View, hint reconcile.Change, failed port.Outcomes) []wire.Control {
	m := wire.Change{Base: c.sent, Generation: want.Generation(), Put: make([]wire.Publication, 0, len(hint.Keys))}
	if len(c.unanswered) == 0 && len(hint.Keys) > 8 {
		c.unanswered = make(map[port.Key]struct{}, len(hint.Keys))
	}
	for _, k := range hint.Keys {
		p, ok := want.Get(k)
		if ok {
			w := wire.FromPublication(p)
			err := w.Check()
			if err == nil {
				m.Put = append(m.Put, w)
				c.unanswered[k] = struct{}{}
				continue
			}
			failed[k] = unsendable(k, err)
		}
		delete(c.unanswered, k)
		if checkable(k) {
			m.Removed = append(m.Removed, k)
		}
	}
	return m.Split()
}

// checkable reports whether a host would accept k, so that it may have been sent.
func checkable(k port.Key) bool { return wire.Publication{Key: k}.Check() == nil }

func unsendable(k port.Key, err error) []port.Outcome {
	return []port.Outcome{{Key: k, State: port.Failed, Reason: port.Because(port.Unsendable, err.Error())}}
}

// read handles the host's messages until the session ends.
func (s *Sink) read(c *session) {
	first := rate.Sometimes{First: 1}
	for {
		m, err := wire.ReadControl(c.in)
		switch {
		case err == nil:
			s.stats.framesIn.Add(1)
			err = c.receive(m)
			if err == nil {
				continue
			}
			fallthrough
		case errors.Is(err, wire.ErrMalformed):
			s.stats.malformed.Add(1)
			if c.malformed.Allow() {
				first.Do(func() {
					s.log.Warn("malformed message from the host dropped", "host", c.Peer().Name, "err", err)
				})
				continue
			}
			s.log.Warn("too many malformed messages from the host; closing the session", "host", c.Peer().Name, "err", err)
		case errors.Is(err, wire.ErrTooLarge):
			s.stats.malformed.Add(1)
			s.log.Warn("malformed message from the host; closing the session", "host", c.Peer().Name, "err", err)
		}
		_ = c.CloseWith(link.ReasonProtocol) // the control stream is of no more use
		return
	}
}

// receive handles one message and wakes the sync that waits for it. Only the
// reader calls it.
func (c *session) receive(m wire.Control) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case m.Ack != nil:
		if !c.started || m.Ack.Generation > c.sent {
			return fmt.Errorf("%w: acknowledges generation %d, which was not sent", wire.ErrMalformed, m.Ack.Generation)
		}
		c.store(m.Ack.Outcomes)
		if m.Ack.Generation > c.ackedGen {
			c.ackedGen, c.progress = m.Ack.Generation, time.Now()
		}
		if m.Ack.Generation == c.sent {
			c.acked = true
		}
	case m.Outcomes != nil:
		c.store(m.Outcomes.Outcomes)
	case m.Resync != nil:
		c.stats.resyncs.Add(1)
		if !c.resyncs.Allow() {
			return fmt.Errorf("%w: asks for snapshots too often", wire.ErrMalformed)
		}
		c.resync = c.started
		c.lost.Notify()
	default:
		return fmt.Errorf("%w: a message that only agents send", wire.ErrMalformed)
	}
	c.received.Notify()
	if !c.syncing {
		c.wake.Notify()
	}
	return nil
}

// store keeps the outcomes of keys that were sent; the last message about a key
// counts. c.mu is held.
func (c *session) store(outcomes []wire.Outcome) {
	if len(c.outcomes) == 0 {
		c.outcomes = make(port.Outcomes, len(outcomes))
	}
	fresh := make(map[port.Key]struct{}, len(outcomes))
	first := make([]port.Outcome, len(outcomes)) // most keys have one outcome
	for i, o := range outcomes {
		if !c.view.Has(o.Key) {
			c.stats.stray.Add(1)
			continue
		}
		if _, ok := fresh[o.Key]; !ok {
			fresh[o.Key] = struct{}{}
			first[i] = o.Port()
			c.outcomes[o.Key] = first[i : i+1 : i+1]
			delete(c.unanswered, o.Key)
			continue
		}
		if len(c.outcomes[o.Key]) < maxOutcomes {
			c.outcomes[o.Key] = append(c.outcomes[o.Key], o.Port())
		}
	}
}
