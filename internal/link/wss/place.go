// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// aliveTime is how long a session may take to prove that its peer is there when
// another agent comes with the same name.
const aliveTime = 5 * time.Second

// place is where the sessions of one guest arrive.
type place struct {
	turn    chan struct{} // has one element while a session is offered
	done    chan struct{} // closed by close
	arrived schedule.Signal
	quiet   rate.Sometimes // for the log

	mu      sync.Mutex
	queued  link.Session // waits for its turn, nil if none does
	current link.Session // the last one that was offered, nil if there was none
	waiting bool         // current was not taken yet
	closed  bool
	refused Refused
}

func newPlace() *place {
	return &place{
		turn: make(chan struct{}, 1), done: make(chan struct{}), arrived: schedule.NewSignal(),
		quiet: rate.Sometimes{Interval: refusalPause},
	}
}

var errDuplicate = errors.New("another agent of this name is connected")

// offer makes s the session of the guest. If another process holds the name and
// answers, s is closed. While one session is offered, one more waits: a newer one takes
// its turn. It owns s.
func (p *place) offer(s link.Session) error {
	if !p.await(s) {
		return p.refuse(s)
	}
	defer func() { <-p.turn }()
	p.mu.Lock()
	old := p.current
	p.mu.Unlock()
	if s.Err() != nil || (old != nil && old.Peer().Identity != s.Peer().Identity && p.alive(old)) {
		return p.refuse(s)
	}
	p.mu.Lock()
	accepted := !p.closed && s.Err() == nil
	if accepted {
		p.current, p.waiting = s, true
	}
	p.mu.Unlock()
	if !accepted {
		return p.refuse(s)
	}
	if old != nil {
		_ = old.CloseWith(link.ReasonSilent) // no-op if it ended
	}
	p.arrived.Notify()
	return nil
}

// await waits for the turn of s. It reports false if that does not come any more.
func (p *place) await(s link.Session) bool {
	p.mu.Lock()
	older := p.queued
	p.queued = s
	p.mu.Unlock()
	if older != nil {
		_ = older.CloseWith(link.ReasonDuplicate)
	}
	turn := false
	select {
	case p.turn <- struct{}{}:
		turn = true
	case <-s.Done():
	case <-p.done:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.queued == s {
		p.queued = nil
	}
	return turn
}

// refuse closes a session that is not taken. It returns why, nil if the place is closed.
func (p *place) refuse(s link.Session) error {
	err := s.Err() // it left, or a newer one took its turn
	select {
	case <-p.done:
		return s.Close()
	default:
	}
	if err == nil {
		err = errDuplicate
	}
	_ = s.CloseWith(link.ReasonDuplicate)
	return err
}

// noteRefused keeps a refused peer, unless it left by itself.
func (p *place) noteRefused(r Refused) {
	var refused *link.RefusedError
	if errors.As(r.Err, &refused) && refused.Code == link.RefusedLost {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = r
}

// alive reports whether the peer of a session answers within aliveTime. It is false once
// the place is closed.
func (p *place) alive(s link.Session) bool {
	answered := make(chan bool, 1)
	go func() { answered <- link.Alive(s, aliveTime) }()
	select {
	case ok := <-answered:
		return ok
	case <-p.done:
		return false
	}
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
	if !p.closed {
		p.closed = true
		close(p.done)
	}
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
