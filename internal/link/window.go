// SPDX-License-Identifier: Apache-2.0

package link

import (
	"errors"
	"sync/atomic"

	"github.com/libp2p/go-yamux/v5"
)

// growthBudget bounds, in bytes, what the windows of one session may grow to in
// all beyond the 256 KiB that each stream begins with, so that flows that nobody
// reads hold no more memory than that.
const growthBudget = 64 << 20

// growthPriority is below the one that yamux opens streams with, and is what it
// lets windows grow with.
const growthPriority = 128

var errNoGrowth = errors.New("the windows of this session have grown enough")

// budget shares growthBudget out to the streams of one session.
type budget struct{ grown atomic.Int64 }

func (w *budget) span() (yamux.MemoryManager, error) { return &windowSpan{of: w}, nil }

// windowSpan is what one stream has.
type windowSpan struct {
	of   *budget
	mine atomic.Int64
}

// ReserveMemory implements yamux.MemoryManager. The number of streams is bounded
// elsewhere.
func (s *windowSpan) ReserveMemory(size int, priority uint8) error {
	if priority > growthPriority {
		return nil
	}
	if s.of.grown.Add(int64(size)) > growthBudget {
		s.of.grown.Add(-int64(size))
		return errNoGrowth
	}
	s.mine.Add(int64(size))
	return nil
}

// ReleaseMemory implements yamux.MemoryManager.
func (s *windowSpan) ReleaseMemory(size int) {
	s.mine.Add(-int64(size))
	s.of.grown.Add(-int64(size))
}

// Done implements yamux.MemoryManager; it may be called more than once.
func (s *windowSpan) Done() { s.of.grown.Add(-s.mine.Swap(0)) }
