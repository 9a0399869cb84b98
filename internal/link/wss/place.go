// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/schedule"
)

// aliveTime is how long a session may take to prove that its peer is there when
// another agent comes with the same name.
const aliveTime = 5 * time.Second

// place is where the sessions of one guest arrive.
type place struct {
	offering sync.Mutex // held while a session is offered
	arrived  schedule.Signal

	mu      sync.Mutex
	current link.Session // the last one that was offered, nil if there was none
	waiting bool         // current was not taken yet
	closed  bool
}

func newPlace() *place { return &place{arrived: schedule.NewSignal()} }

var errDuplicate = errors.New("another agent of this name is connected")

// offer makes s the session of the guest. If another process holds the name and
// answers, s is closed. It owns s.
func (p *place) offer(s link.Session) error {
	p.offering.Lock()
	defer p.offering.Unlock()
	p.mu.Lock()
	old := p.current
	p.mu.Unlock()
	if old != nil && old.Peer().Identity != s.Peer().Identity && link.Alive(old, aliveTime) {
		_ = s.CloseWith(link.ReasonDuplicate)
		return errDuplicate
	}
	p.mu.Lock()
	closed := p.closed
	if !closed {
		p.current, p.waiting = s, true
	}
	p.mu.Unlock()
	if closed {
		return s.Close()
	}
	if old != nil {
		_ = old.CloseWith(link.ReasonSilent) // no-op if it ended
	}
	p.arrived.Notify()
	return nil
}

// take waits for a session that was not taken yet.
func (p *place) take(ctx context.Context) (link.Session, error) {
	for {
		if s := p.next(); s != nil {
			return s, nil
		}
		if err := schedule.Wait(ctx, time.Time{}, p.arrived); err != nil {
			return nil, err
		}
	}
}

// next returns the session that waits, nil if there is none.
func (p *place) next() link.Session {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.waiting {
		return nil
	}
	p.waiting = false
	if p.current.Err() != nil {
		return nil
	}
	return p.current
}

// close closes a session that nobody took, and those that come.
func (p *place) close() {
	p.mu.Lock()
	p.closed = true
	s := p.current
	if !p.waiting {
		s = nil
	}
	p.waiting = false
	p.mu.Unlock()
	if s != nil {
		_ = s.Close()
	}
}
