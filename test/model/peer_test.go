// SPDX-License-Identifier: Apache-2.0

package model

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// How a foreign peer fails.
const (
	_              = iota // not
	peerRefuses           // each call, which does nothing
	peerLosesReply        // does what it is asked for, and its answer is lost
	peerRestarts          // forgets its entries once, and goes on
	peerAbsent            // nobody is there
	peerFaults
)

// peerSink keeps a foreign peer in memory in step by peer.Driver, as the sinks for
// gvproxy and vtunnel do. Its peer is a program of its own: what it has stays when calls
// fail.
type peerSink struct {
	driver *peer.Driver
	wake   schedule.Signal
	unsure bool // what the peer has must be listed
	known  map[peer.Target]string

	mu      sync.Mutex
	fault   int
	entries map[peer.Target]string
}

func newPeerSink(log *slog.Logger) *peerSink {
	s := &peerSink{wake: schedule.NewSignal(), known: map[peer.Target]string{}, entries: map[peer.Target]string{}}
	s.driver = peer.NewDriver("", nil, s.wake, log)
	return s
}

func (s *peerSink) Name() string          { return "peer" }
func (s *peerSink) Wake() <-chan struct{} { return s.wake }

// fail sets how the peer fails from now on.
func (s *peerSink) fail(fault int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fault = fault; fault == peerRestarts {
		clear(s.entries)
	}
	s.wake.Notify()
}

func (s *peerSink) now() map[peer.Target]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.entries)
}

var errPeer = errors.New("the peer does not answer")

// call does something at the peer.
func (s *peerSink) call(do func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.fault {
	case peerRefuses, peerAbsent:
		return errPeer
	case peerLosesReply:
		do()
		return errPeer
	}
	do()
	return nil
}

func (s *peerSink) Sync(ctx context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	s.driver.Update(want, change)
	s.mu.Lock()
	absent, restarted := s.fault == peerAbsent, s.fault == peerRestarts
	s.mu.Unlock()
	if absent {
		s.unsure = true
		return s.driver.Pending(change, port.Because(port.NotConnected)), nil
	}
	if s.driver.Present() || s.unsure || restarted {
		s.known = s.now()
		s.driver.Verify(func(t peer.Target, remote string) bool { return s.known[t] == remote })
		s.driver.MarkAll()
	}
	err := s.driver.Apply(ctx, s)
	s.unsure = err != nil
	return s.driver.Outcomes(), err
}

// Wishes implements peer.Peer.
func (s *peerSink) Wishes(_ context.Context, slot port.Slot) (out []peer.Wish) {
	for h, k := range s.driver.Decide(slot) {
		out = append(out, peer.Wish{Target: peer.Target{Slot: slot, Host: h}, Key: k, Remote: k.AddrPort().String()})
	}
	return out
}

// Known implements peer.Peer.
func (s *peerSink) Known(w peer.Wish) bool {
	if s.known[w.Target] != w.Remote {
		return false
	}
	s.driver.Answer(w, port.Active, port.Reason{})
	return true
}

// Add implements peer.Peer.
func (s *peerSink) Add(_ context.Context, wishes []peer.Wish) error {
	for _, w := range wishes {
		if err := s.call(func() { s.entries[w.Target] = w.Remote }); err != nil {
			return err
		}
		s.known[w.Target] = w.Remote
		s.driver.Answer(w, port.Active, port.Reason{})
	}
	return nil
}

// Remove implements peer.Peer.
func (s *peerSink) Remove(_ context.Context, targets []peer.Target) error {
	for _, t := range targets {
		delete(s.known, t)
		if err := s.call(func() { delete(s.entries, t) }); err != nil {
			return err
		}
		s.driver.Removed(t)
	}
	return nil
}
