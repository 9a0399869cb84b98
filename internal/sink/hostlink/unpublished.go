// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/wire"
)

const (
	// unpublishedPause is between two messages about unpublished ports, so that ports that
	// are published are reported first, and a port that is withheld for a moment not at all.
	unpublishedPause = 100 * time.Millisecond
	// unpublishedRate is how many ports they name a second: a quarter of what hosts accept.
	unpublishedRate = 1000
)

// passOn notifies the current session of changes until ctx ends.
func (s *Sink) passOn(ctx context.Context, changed schedule.Signal, notify func(*session)) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		s.mu.Lock()
		if s.cur != nil {
			notify(s.cur)
		}
		s.mu.Unlock()
	}
}

// reportUnpublished reports the ports that are not published until the session ends. It
// begins anew when the host asks for a snapshot: what the host lost may be of the report.
func (s *Sink) reportUnpublished(ctx context.Context, c *session) {
	if s.o.Unpublished == nil {
		return
	}
	limit := rate.NewLimiter(unpublishedRate, 2*s.o.maxUnpublished)
	for s.reportOnce(ctx, c, limit) {
	}
}

// reportOnce sends one report and its changes, and reports whether to begin another.
func (s *Sink) reportOnce(ctx context.Context, c *session, limit *rate.Limiter) (again bool) {
	sub := s.o.Unpublished.SubscribeTo(func(p port.Publication) bool { return !p.Decision.Allow })
	defer sub.Close()
	u := unpublished{max: s.o.maxUnpublished, sent: make(map[port.Key]wire.UnpublishedPort), omitted: make(map[port.Key]struct{})}
	readRules := true
	for first := true; ; first = false {
		if schedule.Sleep(ctx, unpublishedPause) != nil {
			return false
		}
		view, change := sub.Take()
		m := u.update(view, change.Keys)
		m.Reset = first
		if readRules && s.o.Unread != nil {
			rules := wire.List[wire.Unread](s.o.Unread())
			rules = rules[:min(len(rules), wire.MaxUnread)]
			m.Unread = &rules
		}
		if u.news(m) {
			if limit.WaitN(ctx, min(len(m.Put)+len(m.Removed), limit.Burst())) != nil {
				return false
			}
			if err := c.write(ctx, m.Split()); err != nil {
				_ = c.CloseWith(link.ReasonSilent) // a part of a message may have been sent
				return false
			}
			u.reported = m.Omitted
		}
		readRules = false
		select {
		case <-ctx.Done():
			return false
		case <-c.lost:
			return true
		case <-sub.C():
		case <-c.unread:
			readRules = true
		}
	}
}

// unpublished is what one host knows of ports that are not published.
type unpublished struct {
	max      int
	sent     map[port.Key]wire.UnpublishedPort // at most max
	omitted  map[port.Key]struct{}
	reported int // how many of these the host knows of
}

// news reports whether a message has anything in it.
func (u *unpublished) news(m wire.Unpublished) bool {
	return m.Reset || m.Unread != nil || len(m.Put)+len(m.Removed) > 0 || m.Omitted != u.reported
}

// update returns what has changed by the keys.
func (u *unpublished) update(view table.View[port.Key, port.Publication], keys []port.Key) (m wire.Unpublished) {
	for _, k := range keys {
		if w, ok := describe(view, k); ok {
			u.put(&m, w)
		} else {
			u.remove(&m, k)
		}
	}
	for k := range u.omitted { // there may be room for them now
		if len(u.sent) >= u.max {
			break
		}
		delete(u.omitted, k)
		if w, ok := describe(view, k); ok {
			u.put(&m, w)
		}
	}
	for k := range u.omitted {
		other, ok := k.OtherFamily()
		if _, both := u.omitted[other]; !ok || !both || k.Address.Is4() {
			m.Omitted++ // once for both families
		}
	}
	return m
}

// describe returns what is sent of a port, if it is not published.
func describe(view table.View[port.Key, port.Publication], k port.Key) (w wire.UnpublishedPort, ok bool) {
	p, ok := view.Get(k)
	if !ok || p.Decision.Allow {
		return w, false
	}
	return wire.FromUnpublished(p)
}

func (u *unpublished) put(m *wire.Unpublished, w wire.UnpublishedPort) {
	old, had := u.sent[w.Key]
	switch {
	case had && old.Equal(w):
	case !had && len(u.sent) >= u.max:
		u.omitted[w.Key] = struct{}{}
	default:
		u.sent[w.Key] = w
		m.Put = append(m.Put, w)
	}
}

func (u *unpublished) remove(m *wire.Unpublished, k port.Key) {
	delete(u.omitted, k)
	if _, had := u.sent[k]; had {
		delete(u.sent, k)
		m.Removed = append(m.Removed, k)
	}
}
