// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/wire"
)

// maxOutcomes is how many outcomes of one key are kept: one for each host
// address that it can ask for, twice over.
const maxOutcomes = 2 * wire.MaxHosts

// perPublication is how long a host may be silent over a large set, for each
// publication in it, beyond the deadline of a Sync.
const perPublication = time.Millisecond

// errGone means that the session ended during a sync.
var errGone = errors.New("session gone")

// session is one host and what it was told and said.
type session struct {
	link.Session
	o     Options
	stats *counters
	in    io.Reader
	out   io.Writer
	heard chan struct{} // receives when the host said something
	poke  func()        // asks for a Sync

	mu         sync.Mutex
	told       bool // a snapshot was sent
	sent       uint64
	sentAt     time.Time // of what is not acknowledged yet
	acked      bool      // sent is acknowledged
	view       reconcile.View
	partial    bool                  // view has more than the host can be told
	unheard    map[port.Key]struct{} // sent, and no outcome since
	outcomes   port.Outcomes         // said since the last sync took them
	resync     bool
	messages   uint64 // heard in all
	waiting    bool   // a sync is under way
	complaints budget
	requests   budget
}

func newSession(ls link.Session, stats *counters, o Options, poke func()) *session {
	return &session{
		Session: ls, o: o, stats: stats, poke: poke,
		in:      bufio.NewReader(countReader{ls.Control(), stats}),
		out:     ls.Control(),
		heard:   make(chan struct{}, 1),
		unheard: make(map[port.Key]struct{}), outcomes: make(port.Outcomes),
		complaints: budget{burst: 64, every: time.Second},
		requests:   budget{burst: 16, every: 10 * time.Second},
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

// budget is a token bucket.
type budget struct {
	burst int
	every time.Duration // one comes back
	used  int
	last  time.Time
}

// spend takes one and reports whether there was one.
func (b *budget) spend(now time.Time) bool {
	if back := int(now.Sub(b.last) / b.every); back > 0 {
		b.used = max(0, b.used-back)
		b.last = now
	}
	b.used++
	return b.used <= b.burst
}

// sync brings the host to want and returns what it said of it. errGone means
// that the session ended.
func (c *session) sync(ctx context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	c.mu.Lock()
	c.waiting = true
	heard := c.messages
	c.mu.Unlock()
	failed := make(port.Outcomes)
	out, err := c.exchange(ctx, want, change, heard, failed)
	if out != nil {
		maps.Copy(out, failed)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = false
	if len(c.outcomes) > 0 || c.resync {
		c.poke() // came after we looked
	}
	return out, err
}

func (c *session) exchange(ctx context.Context, want reconcile.View, change reconcile.Change, heard uint64, failed port.Outcomes) (port.Outcomes, error) {
	for {
		if err := c.send(ctx, want, change, failed); err != nil {
			return c.broken(ctx, err)
		}
		if out, ok := c.answer(want); ok {
			return out, nil
		}
		select {
		case <-c.heard:
		case <-c.Done():
			return nil, errGone
		case <-ctx.Done():
			return c.late(ctx, want, change, heard)
		}
	}
}

// broken ends a session that took half a message.
func (c *session) broken(ctx context.Context, err error) (port.Outcomes, error) {
	select {
	case <-c.Done():
		return nil, errGone
	default:
	}
	reason := link.ReasonProtocol // the control stream alone was closed
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		reason = link.ReasonSilent
		c.stats.silent.Add(1)
	}
	_ = c.CloseWith(reason)
	if errors.Is(ctx.Err(), context.Canceled) {
		return nil, fmt.Errorf("send to host: %w", err)
	}
	return nil, errGone
}

// late is the end of ctx while the host owes an answer.
func (c *session) late(ctx context.Context, want reconcile.View, change reconcile.Change, heard uint64) (port.Outcomes, error) {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return nil, ctx.Err()
	}
	c.mu.Lock()
	owes := time.Since(c.sentAt)
	silent := c.messages == heard && owes > time.Duration(len(c.unheard))*perPublication
	hopeless := silent || owes > c.o.Patience
	c.mu.Unlock()
	if hopeless {
		c.stats.silent.Add(1)
		_ = c.CloseWith(link.ReasonSilent)
		return nil, errGone
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.take(want)
	for _, k := range change.Keys {
		if _, owed := c.unheard[k]; owed {
			if _, ok := want.Get(k); ok {
				out[k] = []port.Outcome{{Key: k, State: port.Pending, Reason: "the host is at work on it"}}
			}
		}
	}
	return out, fmt.Errorf("host has not acknowledged generation %d yet", c.sent)
}

// answer returns what the host said if it acknowledged all it was told.
func (c *session) answer(want reconcile.View) (port.Outcomes, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.acked || c.resync {
		return nil, false
	}
	for k := range c.unheard {
		c.outcomes[k] = []port.Outcome{{Key: k, State: port.Pending, Reason: "the host said nothing of it"}}
	}
	c.unheard = make(map[port.Key]struct{}) // a cleared map would keep the room of a snapshot
	return c.take(want), true
}

// take returns what was said of keys that are wanted. c.mu is held.
func (c *session) take(want reconcile.View) port.Outcomes {
	out := c.outcomes
	c.outcomes = make(port.Outcomes)
	for k := range out {
		if _, ok := want.Get(k); !ok {
			delete(out, k)
		}
	}
	return out
}

// send tells the host what it does not know yet: all of want, the change, or
// nothing. What cannot be told goes into failed.
func (c *session) send(ctx context.Context, want reconcile.View, change reconcile.Change, failed port.Outcomes) error {
	c.mu.Lock()
	gen := want.Generation()
	var parts []wire.Control
	switch {
	case !c.told || c.resync || (gen != c.sent && (change.Base == 0 || change.Base > c.sent ||
		c.partial || want.Len() > c.o.maxPublications)):
		parts = c.snapshot(want, failed)
		c.stats.snapshots.Add(1)
	case gen == c.sent:
		c.mu.Unlock()
		return nil
	default:
		// The hint names what changed since Base; the host stands at or after it,
		// so that its keys are all that can differ, and maybe more.
		parts = c.change(want, change, failed)
		c.stats.changes.Add(1)
	}
	if c.acked || !c.told {
		c.sentAt = time.Now()
	}
	// Before the first byte leaves: the answer can be there before Write returns.
	c.told, c.sent, c.acked, c.resync, c.view = true, gen, false, false, want
	c.mu.Unlock()

	control := c.Control()
	deadline, _ := ctx.Deadline()
	if err := control.SetWriteDeadline(deadline); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = control.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	w := countWriter{control, c.stats}
	for _, p := range parts {
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

// snapshot is all of want that the host can be told. c.mu is held.
func (c *session) snapshot(want reconcile.View, failed port.Outcomes) []wire.Control {
	s := wire.Snapshot{Epoch: c.o.Epoch, Generation: want.Generation(), Publications: make([]wire.Publication, 0, min(want.Len(), c.o.maxPublications))}
	c.unheard = make(map[port.Key]struct{}, want.Len())
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
			failed[k] = untold(k, err)
			continue
		}
		text += w.TextBytes()
		s.Publications = append(s.Publications, w)
		c.unheard[k] = struct{}{}
	}
	return s.Split()
}

// change is what differs from what the host was told. c.mu is held.
func (c *session) change(want reconcile.View, hint reconcile.Change, failed port.Outcomes) []wire.Control {
	m := wire.Change{Base: c.sent, Generation: want.Generation(), Put: make([]wire.Publication, 0, len(hint.Keys))}
	if len(c.unheard) == 0 && len(hint.Keys) > 8 {
		c.unheard = make(map[port.Key]struct{}, len(hint.Keys))
	}
	for _, k := range hint.Keys {
		p, ok := want.Get(k)
		if ok {
			w := wire.FromPublication(p)
			err := w.Check()
			if err == nil {
				m.Put = append(m.Put, w)
				c.unheard[k] = struct{}{}
				continue
			}
			failed[k] = untold(k, err)
		}
		delete(c.unheard, k)
		if checkable(k) {
			m.Removed = append(m.Removed, k)
		}
	}
	return m.Split()
}

// checkable reports whether a host would accept k, so that it can have been told.
func checkable(k port.Key) bool { return wire.Publication{Key: k}.Check() == nil }

func untold(k port.Key, err error) []port.Outcome {
	return []port.Outcome{{Key: k, State: port.Failed, Reason: "the host cannot be told: " + err.Error()}}
}

// read takes what the host says until the session ends.
func (s *Sink) read(c *session) {
	for {
		m, err := wire.ReadControl(c.in)
		switch {
		case err == nil:
			s.stats.framesIn.Add(1)
			err = c.hear(m)
			if err == nil {
				continue
			}
			fallthrough
		case errors.Is(err, wire.ErrMalformed):
			s.stats.malformed.Add(1)
			first := c.complaints.used == 0
			if c.complaints.spend(time.Now()) {
				if first {
					s.log.Warn("host sent what it must not; dropped", "host", c.Peer().Name, "err", err)
				}
				continue
			}
			s.log.Warn("host keeps sending what it must not; session closed", "host", c.Peer().Name, "err", err)
		case errors.Is(err, wire.ErrTooLarge):
			s.stats.malformed.Add(1)
			s.log.Warn("host sent what it must not; session closed", "host", c.Peer().Name, "err", err)
		}
		_ = c.CloseWith(link.ReasonProtocol) // the control stream is of no more use
		return
	}
}

// hear keeps what one message says and wakes the sync that waits for it. Only
// the reader calls it.
func (c *session) hear(m wire.Control) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case m.Ack != nil:
		if !c.told || m.Ack.Generation > c.sent {
			return fmt.Errorf("%w: acknowledges generation %d, which was not sent", wire.ErrMalformed, m.Ack.Generation)
		}
		c.keep(m.Ack.Outcomes)
		if m.Ack.Generation == c.sent {
			c.acked = true
		}
	case m.Outcomes != nil:
		c.keep(m.Outcomes.Outcomes)
	case m.Resync != nil:
		c.stats.resyncs.Add(1)
		if !c.requests.spend(time.Now()) {
			return fmt.Errorf("%w: asks for snapshots without end", wire.ErrMalformed)
		}
		c.resync = c.told
	default:
		return fmt.Errorf("%w: a message that only agents send", wire.ErrMalformed)
	}
	c.messages++
	select {
	case c.heard <- struct{}{}:
	default:
	}
	if !c.waiting {
		c.poke()
	}
	return nil
}

// keep stores outcomes of keys that the host was told; what is said last
// counts. c.mu is held.
func (c *session) keep(said []wire.Outcome) {
	if len(c.outcomes) == 0 {
		c.outcomes = make(port.Outcomes, len(said))
	}
	fresh := make(map[port.Key]struct{}, len(said))
	first := make([]port.Outcome, len(said)) // most keys have one outcome
	for i, o := range said {
		if _, ok := c.view.Get(o.Key); !ok {
			c.stats.stray.Add(1)
			continue
		}
		if _, ok := fresh[o.Key]; !ok {
			fresh[o.Key] = struct{}{}
			first[i] = o.Port()
			c.outcomes[o.Key] = first[i : i+1 : i+1]
			delete(c.unheard, o.Key)
			continue
		}
		if len(c.outcomes[o.Key]) < maxOutcomes {
			c.outcomes[o.Key] = append(c.outcomes[o.Key], o.Port())
		}
	}
}
