// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"
)

// supply gives so many reads of so many bytes and then ends; it takes all writes.
type supply struct {
	net.Conn
	reads, size int
}

func (s *supply) Read(b []byte) (int, error) {
	if s.reads == 0 {
		return 0, io.EOF
	}
	s.reads--
	return min(len(b), s.size), nil
}

func (s *supply) Write(b []byte) (int, error)     { return len(b), nil }
func (s *supply) SetReadDeadline(time.Time) error { return nil }

// What is set up once carries any number of bytes: no read or write allocates.
func TestCopyAllocations(t *testing.T) {
	for _, size := range []int{64, largeBuffer} {
		src := &supply{size: size}
		d := direction{src: src, dst: &supply{}, moved: new(atomic.Uint64)}
		cost := func(reads int) float64 {
			return testing.AllocsPerRun(20, func() {
				src.reads = reads
				_, _ = d.copy()
			})
		}
		if few, many := cost(10), cost(10_000); many > few+4 {
			t.Errorf("reads of %d bytes: 10 allocate %v times, 10,000 %v times", size, few, many)
		}
	}
}
