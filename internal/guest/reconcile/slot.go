// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Slot is a sink that comes and goes. Without one, all is pending for a reason; without
// a reason there are no outcomes.
type Slot struct {
	name string
	wake schedule.Signal

	mu     sync.Mutex
	sink   Sink // nil for none
	reason port.Reason
	puts   uint64 // calls of Put
	synced uint64 // puts of the last Sync that succeeded

	used    Sink          // the last one that was synced
	leaving Sink          // must close what it published, nil for none
	left    chan struct{} // closed when it has
}

// NewSlot returns an empty slot for a sink of a name.
func NewSlot(name string) *Slot { return &Slot{name: name, wake: schedule.NewSignal()} }

// Name implements Sink.
func (s *Slot) Name() string { return s.name }

// Wake implements Sink.
func (s *Slot) Wake() <-chan struct{} { return s.wake }

// Put replaces the sink, which must have closed what it published. Nil is none, for a
// reason.
func (s *Slot) Put(sink Sink, reason port.Reason) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sink == nil && s.sink == nil && s.reason == reason {
		return
	}
	s.put(sink, reason)
	s.stay()
}

func (s *Slot) put(sink Sink, reason port.Reason) {
	s.sink, s.reason = sink, reason
	s.puts++
	s.wake.Notify()
}

// Withdraw empties the slot of a sink that runs on, and has it close what it published.
// The channel is closed when it has.
func (s *Slot) Withdraw() (left <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sink != nil {
		sink := s.sink
		s.put(nil, port.Reason{})
		s.leaving, s.left = sink, make(chan struct{})
		if s.used != sink { // it published nothing yet
			s.stay()
		}
	}
	if s.leaving == nil {
		done := make(chan struct{})
		close(done)
		return done
	}
	return s.left
}

// stay ends the wait for a sink that leaves.
func (s *Slot) stay() {
	if s.leaving != nil {
		s.leaving = nil
		close(s.left)
	}
}

// leave has a sink that leaves close what it published.
func (s *Slot) leave(ctx context.Context) error {
	s.mu.Lock()
	leaving := s.leaving
	s.mu.Unlock()
	if leaving == nil {
		return nil
	}
	if _, err := leaving.Sync(ctx, View{}, Change{}); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leaving == leaving {
		s.stay()
	}
	return nil
}

// Forward passes on what wakes a sink until ctx ends.
func (s *Slot) Forward(ctx context.Context, sink Sink) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-sink.Wake():
			s.wake.Notify()
		}
	}
}

// Reset resets the flows of publications that a rule forbids, if the sink has any.
func (s *Slot) Reset(keys []port.Key) {
	s.mu.Lock()
	sink := s.sink
	s.mu.Unlock()
	if r, ok := sink.(interface{ Reset(keys []port.Key) }); ok {
		r.Reset(keys)
	}
}

// Sync implements Sink.
func (s *Slot) Sync(ctx context.Context, want View, change Change) (port.Outcomes, error) {
	if err := s.leave(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	sink, reason, puts, fresh := s.sink, s.reason, s.puts, s.puts != s.synced
	s.used = sink
	s.mu.Unlock()
	if fresh {
		change = Change{Generation: want.Generation(), Keys: slices.Collect(maps.Keys(maps.Collect(want.All())))}
	}
	out := empty(want, change, reason)
	if sink != nil {
		own, err := sink.Sync(ctx, want, change)
		if err != nil || !fresh {
			return own, err
		}
		maps.Copy(out, own)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced = puts
	return out, nil
}

// empty returns the outcomes of a slot without a sink.
func empty(want View, change Change, reason port.Reason) port.Outcomes {
	out := make(port.Outcomes, len(change.Keys))
	for _, k := range change.Keys {
		out[k] = nil
		if _, ok := want.Get(k); ok && !reason.IsZero() {
			out[k] = []port.Outcome{{State: port.Pending, Reason: reason}}
		}
	}
	return out
}
