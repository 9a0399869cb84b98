// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/replica"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
)

// session is one host, with what was sent to it and what it answered.
type session struct {
	link.Session
	s      *Sink
	tables *replica.Session

	mu     sync.Mutex
	flight []batch // sent, and not seen yet

	// Of the goroutine that reads.
	seen    reconcile.View     // the wanted set as the host has it, as far as it said
	refused map[port.Key]error // of seen, what was not sent
	heard   bool               // the host has sent its outcomes; written under s.mu
	upTo    *uint64            // what a message says that the host has seen, nil for nothing
	step    *replica.Step[port.Key, port.Answer]
}

// batch is one step of the wanted set.
type batch struct {
	view    reconcile.View
	keys    []port.Key // that may have changed
	refused map[port.Key]error
}

func newSession(s *Sink, ls link.Session) *session {
	c := &session{Session: ls, s: s, refused: make(map[port.Key]error)}
	var once sync.Once
	c.tables = replica.New(ls.Control(), replica.Options{
		Patience: s.o.Patience, Stats: &s.stats.tables, After: c.record,
		Fault: func(err error) {
			once.Do(func() { s.log.Warn("message of the host dropped", "host", c.Peer().Name, "err", err) })
		},
	})
	return c
}

// exchange keeps the tables of a session until it ends.
func (s *Sink) exchange(ctx context.Context, c *session) {
	select {
	case <-s.followed:
	case <-ctx.Done():
		return
	}
	wanted, unpublished, same := replica.Wanted(), replica.Unpublished(), func(k port.Key) port.Key { return k }
	fit := func(p port.Publication) port.Fact { return p.Fit() }
	wanted.Max = cmp.Or(s.o.maxPublications, wanted.Max)
	unpublished.Max = cmp.Or(s.o.maxUnpublished, unpublished.Max)
	replica.Send(c.tables, wanted, replica.From[port.Key, port.Fact, port.Key, port.Publication]{
		Table: s.record.Wanted(), Begin: s.record.Begun(), Key: same, Row: fit, Partial: s.record.Incomplete,
		Sent: c.sent, Acked: func(generation uint64) { c.upTo = &generation }, Late: c.late,
	})
	replica.Send(c.tables, unpublished, replica.From[port.Key, port.Fact, port.Key, port.Publication]{
		Table: s.o.Unpublished, Only: func(p port.Publication) bool { return !p.Decision.Allow }, Key: same, Row: fit,
	})
	rule := func(r wire.Unread) wire.Unread { return r }
	replica.Send(c.tables, replica.Unread(), replica.From[wire.Unread, wire.Unread, wire.Unread, wire.Unread]{Table: s.unread, Key: rule, Row: rule})
	replica.Receive(c.tables, replica.Outcomes(), func(step replica.Step[port.Key, port.Answer]) error {
		c.step = &step
		return nil
	})
	err := c.tables.Run(ctx)
	reason := link.ReasonProtocol // the control connection is of no more use
	switch {
	case ctx.Err() != nil || c.Err() != nil:
		return
	case errors.Is(err, replica.ErrSilent):
		s.stats.silent.Add(1)
		reason = link.ReasonSilent
	case errors.Is(err, replica.ErrProtocol):
		s.log.Warn("closing the session with the host", "host", c.Peer().Name, "err", err)
	}
	_ = c.CloseWith(reason)
}

// sent notes a step before it leaves.
func (c *session) sent(view reconcile.View, keys []port.Key, refused map[port.Key]error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flight = append(c.flight, batch{view, keys, refused})
}

// landed takes the steps that the host has seen.
func (c *session) landed() []batch {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for c.upTo != nil && n < len(c.flight) && c.flight[n].view.Generation() <= *c.upTo {
		n++
	}
	c.upTo = nil
	landed := c.flight[:n:n]
	c.flight = slices.Clone(c.flight[n:])
	return landed
}

// mayHave reports whether the host may have a key at present.
func (c *session) mayHave(k port.Key) bool {
	if c.seen.Has(k) {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.flight, func(b batch) bool { return b.view.Has(k) })
}

// record records what a message of the host said: its outcomes, and what it has seen. What it
// has seen and gives no outcome of is pending.
func (c *session) record() {
	step := c.step
	c.step = nil
	if step == nil && c.upTo == nil {
		return
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.s.cur != c {
		return
	}
	var known []port.Key
	if step != nil && step.Whole {
		known = c.s.record.Keys()
	}
	var landed []batch
	var observed []int64
	c.s.record.Update(func(x *reconcile.RecordTx) {
		open := make(map[port.Key]struct{}) // keys whose outcomes are to be looked at again
		if step != nil {
			c.store(x, step, known, open)
		}
		landed = c.landed()
		for _, b := range landed {
			c.seen = b.view
			for _, k := range b.keys {
				open[k] = struct{}{}
				delete(c.refused, k)
				if err := b.refused[k]; err != nil {
					c.refused[k] = err
				}
			}
		}
		for k := range open {
			if at := c.settle(x, k); at != 0 {
				observed = append(observed, at)
			}
		}
	})
	if len(landed) > 0 {
		c.s.record.InSync(observed)
	}
}

// store records the outcomes of a step, and notes the keys that have none any more. known are
// those that have some, of a step that is whole.
func (c *session) store(x *reconcile.RecordTx, step *replica.Step[port.Key, port.Answer], known []port.Key, open map[port.Key]struct{}) {
	named := make(map[port.Key]struct{}, len(step.Put))
	for _, a := range step.Put {
		named[a.Key] = struct{}{}
		if !c.mayHave(a.Key) {
			c.s.stats.stray.Add(1)
			continue
		}
		x.Set(a.Key, a.Outcomes...)
	}
	c.heard = c.heard || step.Whole
	for _, k := range append(known, step.Removed...) {
		if _, ok := named[k]; !ok {
			x.Set(k)
			open[k] = struct{}{}
		}
	}
}

// settle records what a key has instead of an outcome of the host, if there is none. It returns
// the time of the event of a publication that is active, 0 for none.
func (c *session) settle(x *reconcile.RecordTx, k port.Key) (observed int64) {
	p, wanted := c.seen.Get(k)
	list := x.Get(k)
	switch err := c.refused[k]; {
	case !wanted:
		x.Set(k)
	case err != nil:
		x.Set(k, port.Outcome{State: port.Failed, Reason: port.Because(port.Unsendable, err.Error())})
	case !c.heard || ours(list):
		x.Set(k, pending(port.Unstatement))
	case slices.ContainsFunc(list, func(o port.SinkOutcome) bool { return o.State == port.Active }):
		return p.Observed
	}
	return 0
}

// ours reports whether outcomes are not of a host.
func ours(list []port.SinkOutcome) bool {
	if len(list) == 0 {
		return true
	}
	switch list[0].Reason.Code() {
	case port.NoHost, port.Unanswered, port.Unstatement, port.Unsendable:
		return true
	}
	return false
}

// late records that the host has not answered. What has an outcome of this host keeps that.
func (c *session) late() {
	c.mu.Lock()
	flight := slices.Clone(c.flight)
	c.mu.Unlock()
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.s.cur != c {
		return
	}
	c.s.record.Failed()
	c.s.record.Update(func(x *reconcile.RecordTx) {
		for _, b := range flight {
			for _, k := range b.keys {
				if b.view.Has(k) && (!c.heard || ours(x.Get(k))) {
					x.Set(k, pending(port.Unanswered))
				}
			}
		}
	})
}
