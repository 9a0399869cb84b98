// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"sync"
	"sync/atomic"
	"time"
)

// Idle calls a function once after a time without Touch. Its timer runs out at
// most once per that time, however often it is touched.
type Idle struct {
	after time.Duration
	start time.Time
	last  atomic.Int64 // time of the last Touch since start
	fn    func()

	mu    sync.Mutex
	timer *time.Timer // nil when stopped
}

// NewIdle starts the wait. fn runs on a goroutine of its own. Stop must be called.
func NewIdle(after time.Duration, fn func()) *Idle {
	i := &Idle{after: after, start: time.Now(), fn: fn}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.timer = time.AfterFunc(after, i.fire)
	return i
}

// Touch begins the wait anew.
func (i *Idle) Touch() { i.last.Store(int64(time.Since(i.start))) }

// Quiet is the time since the last Touch.
func (i *Idle) Quiet() time.Duration {
	return time.Since(i.start) - time.Duration(i.last.Load())
}

// Stop ends the wait. fn may still be running.
func (i *Idle) Stop() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.timer != nil {
		i.timer.Stop()
		i.timer = nil
	}
}

func (i *Idle) fire() {
	left := i.after - i.Quiet()
	if left > 0 {
		i.mu.Lock()
		defer i.mu.Unlock()
		if i.timer != nil {
			i.timer.Reset(left)
		}
		return
	}
	i.fn()
}
