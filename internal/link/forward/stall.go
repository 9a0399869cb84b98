// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// A direction whose write makes no progress does not read its source. It looks whether
// that was reset after stallAfter, and then ever less often, up to every maxStall.
const (
	stallAfter = time.Second
	maxStall   = 30 * time.Second
)

// stall calls a function while a write makes no progress. Its timer is armed by a write,
// expires at most once per stallAfter, and is not armed again if there is no write under
// way then. So a write costs three atomic operations.
type stall struct {
	check func()

	writes atomic.Uint64 // begun and ended ones: odd during a write
	armed  atomic.Bool

	mu      sync.Mutex
	timer   *time.Timer
	seen    uint64 // writes when the timer was armed
	pause   time.Duration
	stopped bool
}

func (s *stall) begin() {
	s.writes.Add(1)
	if !s.armed.Load() {
		s.arm()
	}
}

func (s *stall) end() { s.writes.Add(1) }

func (s *stall) arm() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || s.armed.Swap(true) {
		return
	}
	s.pause, s.seen = stallAfter, s.writes.Load()
	if s.timer == nil {
		s.timer = time.AfterFunc(s.pause, s.fire)
		return
	}
	s.timer.Reset(s.pause)
}

func (s *stall) fire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	writes := s.writes.Load()
	if s.stopped {
		return
	}
	if writes%2 == 0 {
		s.armed.Store(false)
		if writes == s.writes.Load() {
			return
		}
		s.armed.Store(true) // a write began, and may have found the timer armed
	}
	if writes == s.seen {
		s.check()
		s.pause = min(2*s.pause, maxStall)
	} else {
		s.pause = stallAfter
	}
	s.seen = writes
	s.timer.Reset(s.pause)
}

// stop ends the calls; none is under way when it returns.
func (s *stall) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	if s.timer != nil {
		s.timer.Stop()
	}
}

// stalled ends both directions if src was reset, which nobody notices while a write
// to dst waits. It does nothing where the other direction has noticed it.
func (d *direction) stalled() {
	d.s.mu.Lock()
	noticed := d.other.draining
	d.s.mu.Unlock()
	if noticed {
		return
	}
	if v, ok := d.src.(Stream); ok {
		// Once both sides have sent their end, the peer may close.
		if peerClosed(v.Raw()) && !d.other.ending.Load() {
			d.s.abort(os.NewSyscallError("read", errConnReset))
		}
		return
	}
	if err := lost(d.src); err != nil {
		d.s.abort(err)
	}
}
