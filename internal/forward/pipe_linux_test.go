// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"errors"
	"net"
	"runtime/debug"
	"sync/atomic"
	"testing"
)

// resetStream is a Stream that is reset before it takes anything.
type resetStream struct {
	Stream
	raw net.Conn
}

func (s resetStream) Raw() net.Conn        { return s.raw }
func (s resetStream) BeginChunk(int) error { return errors.New("stream reset") }

// A flow that is reset while it has bytes in a pipe closes the pipe, and does not
// leave it to the garbage collector.
func TestResetFlowClosesItsPipe(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	client, src := pair(t, "tcp")
	raw, _ := pair(t, "unix")
	d := direction{moved: new(atomic.Uint64)}
	base := fds(t)
	for range 50 {
		write(t, client, "bytes")
		if _, err := d.toChunks(resetStream{raw: raw}, src.(*net.TCPConn)); err == nil {
			t.Fatal("no error of a stream that was reset")
		}
	}
	if n := fds(t); n > base+4 {
		t.Errorf("%d descriptors after 50 flows that were reset, %d before", n, base)
	}
}
