// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/wire"
)

// maxLevelRequests is how many requests for a log level wait for one guest.
const maxLevelRequests = 16

// levelRequests are those of one guest for which there is no answer yet. h.mu guards them.
type levelRequests struct {
	last    uint64                  // number of the newest
	unsent  []wire.Control          // in order
	waiting map[uint64]chan<- error // by number; each has room for one answer
}

// SetLogLevel has the agent of a guest log more, for a time from 1 s to a day. It returns
// when the agent has answered.
func (h *Host) SetLogLevel(ctx context.Context, name, level string, components []string, lasts time.Duration) error {
	i := slices.IndexFunc(h.guests, func(g *guest) bool { return g.name == name })
	if i < 0 {
		return fmt.Errorf("guest %q: want one of %s", name, h.names())
	}
	answer, err := h.guests[i].askLevel(wire.LogLevel{Level: level, Components: components, Seconds: int(lasts.Seconds())})
	if err != nil {
		return err
	}
	select {
	case err := <-answer:
		if err != nil {
			return fmt.Errorf("guest %q: %w", name, err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("guest %q: no answer: %w", name, context.Cause(ctx))
	}
}

func (h *Host) names() string {
	names := make([]string, len(h.guests))
	for i, g := range h.guests {
		names[i] = fmt.Sprintf("%q", g.name)
	}
	return strings.Join(names, ", ")
}

// askLevel sends a request, and returns where its answer comes.
func (g *guest) askLevel(l wire.LogLevel) (<-chan error, error) {
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	q := &g.asked
	switch {
	case !g.connected:
		return nil, fmt.Errorf("guest %q is not connected: %s", g.name, g.err)
	case !g.peer.LogLevel:
		return nil, fmt.Errorf("guest %q: its agent (%s) takes no log level from a host: it is older than this one",
			g.name, cmp.Or(g.peer.Version, "unknown version"))
	case len(q.waiting) >= maxLevelRequests:
		return nil, fmt.Errorf("guest %q: %d requests for a log level wait for its answer", g.name, len(q.waiting))
	}
	q.last++
	l.Number = q.last
	c := wire.Control{LogLevel: &l}
	if err := c.Check(); err != nil {
		return nil, fmt.Errorf("guest %q: %w", g.name, err)
	}
	answer := make(chan error, 1)
	if q.waiting == nil {
		q.waiting = make(map[uint64]chan<- error)
	}
	q.waiting[l.Number], q.unsent = answer, append(q.unsent, c)
	g.writer.Notify()
	return answer, nil
}

// take returns the requests to send. h.mu is held.
func (q *levelRequests) take() []wire.Control {
	list := q.unsent
	q.unsent = nil
	return list
}

// answered passes an answer on. The text is the guest's.
func (g *guest) answered(a *wire.LogLevelSet) {
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	answer, ok := g.asked.waiting[a.Number]
	if !ok {
		return
	}
	delete(g.asked.waiting, a.Number)
	var err error
	if a.Reason != "" {
		err = fmt.Errorf("its agent refuses: %s", a.Reason)
	}
	answer <- err
}

// end answers all requests at the end of a session. h.mu is held.
func (q *levelRequests) end() {
	for _, answer := range q.waiting {
		answer <- errors.New("the connection was lost before its agent answered")
	}
	q.waiting, q.unsent = nil, nil
}
