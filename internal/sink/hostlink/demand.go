// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"context"
	"fmt"
	"slices"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/wire"
)

// takeDemand takes what the host asks for by name. One text that cannot be read refuses all.
func (c *session) takeDemand(m *wire.Demand) error {
	if c.o.Demand == nil {
		return fmt.Errorf("%w: asks for ports by name, which this agent's hello does not allow", wire.ErrMalformed)
	}
	list := make([]port.Demand, 0, len(m.Ports))
	for _, text := range m.Ports {
		d, err := port.ParseDemand(text)
		if err != nil {
			return fmt.Errorf("%w: demand: %w", wire.ErrMalformed, err)
		}
		list = append(list, d)
	}
	c.demand(list)
	c.demands.Notify()
	return nil
}

// begin ends what was asked for by name, unless it is the same process of a host that is back.
// Another one would be sent ports that it never asked for, and an older host never says what it
// does not ask for. s.mu is held.
func (s *Sink) begin(p link.Peer) {
	if s.o.Demand != nil && (p.Identity != s.asker || !p.Demand) {
		s.o.Demand(nil)
		s.asker = p.Identity
	}
}

// demand passes on what a session's host asks for, if that is still the host. What it asked
// for stays when it is lost, until another one is there.
func (s *Sink) demand(c *session, list []port.Demand) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cur == c && s.o.Demand != nil {
		s.o.Demand(list)
	}
}

// reportDemands tells the host what waits, until the session ends.
func (s *Sink) reportDemands(ctx context.Context, c *session) {
	if s.o.Demands == nil || !c.Peer().Demand {
		return
	}
	if s.o.Demand == nil { // else the first report follows what the host asks for
		c.demands.Notify()
	}
	var sent []wire.Waiting
	for first := true; ; first = false {
		select {
		case <-ctx.Done():
			return
		case <-c.demands:
		}
		waiting := s.o.Demands()
		waiting = waiting[:min(len(waiting), wire.MaxDemands)]
		if first || !slices.Equal(waiting, sent) {
			sent = waiting
			if err := c.write(ctx, []wire.Control{{Demanded: &wire.Demanded{Waiting: waiting}}}); err != nil {
				_ = c.CloseWith(link.ReasonSilent) // a part of a message may have been sent
				return
			}
		}
		if schedule.Sleep(ctx, unpublishedPause) != nil {
			return
		}
	}
}
