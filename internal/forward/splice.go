// SPDX-License-Identifier: Apache-2.0

// Package forward carries the bytes of flows: it splices two connections with
// half-close and reset in both directions, and serves on the guest the flows
// that the host asks for.
package forward

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// An idle direction holds a small buffer only; a large one is borrowed for as
	// long as reads fill the small one.
	smallBuffer = 4 << 10
	largeBuffer = 64<<10 - 12 // with yamux's header one frame of a link

	// splice(2) holds a pipe, two descriptors, for as long as the direction lives,
	// idle or not. Only a direction that has moved this much gets one.
	spliceAfter = 1 << 20
	spliceChunk = 16 << 20

	// drainTime is how long we still take what one side sends to a side that is
	// gone, so that the answer on its way is not destroyed by a reset.
	drainTime = time.Second
)

var (
	smallBuffers = sync.Pool{New: func() any { return new([smallBuffer]byte) }}
	largeBuffers = sync.Pool{New: func() any { return new([largeBuffer]byte) }}
)

// past is a deadline that has gone by.
var past = time.Unix(1, 0)

// Meter counts the bytes that a splice moved, while it moves them. Several
// splices may share one.
type Meter struct {
	AToB, BToA atomic.Uint64
}

// Splice moves bytes between a and b until both directions ended, and closes
// both. The end of one direction is passed on by CloseWrite and leaves the other
// open for as long as it takes; a reset, any other failed read, and the end of
// ctx reset both (RST on TCP, Reset on a link.Stream). A side that no longer
// takes bytes may still deliver: what it sends reaches the other side before
// that is told.
//
// A connection without CloseWrite ends in both directions at once. m may be nil.
// Splice returns nil if both directions ended in order, else why not; it leaves
// no goroutine behind.
func Splice(ctx context.Context, a, b net.Conn, m *Meter) error {
	if m == nil {
		m = new(Meter)
	}
	s := &splice{}
	s.dirs[0] = direction{s: s, src: a, dst: b, moved: &m.AToB, other: &s.dirs[1]}
	s.dirs[1] = direction{s: s, src: b, dst: a, moved: &m.BToA, other: &s.dirs[0]}

	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		s.abort(context.Cause(ctx))
	})
	var wg sync.WaitGroup
	wg.Go(s.dirs[1].run)
	s.dirs[0].run()
	wg.Wait()
	if !stop() {
		<-stopped
	}
	if !s.aborted {
		// Both directions have ended: what close says of a peer that has gone in
		// the meantime is of no interest.
		_ = a.Close()
		_ = b.Close()
	}
	return s.err
}

type splice struct {
	dirs [2]direction

	mu      sync.Mutex
	aborted bool
	err     error
}

// direction moves what src sends to dst.
type direction struct {
	s        *splice
	src, dst net.Conn
	moved    *atomic.Uint64
	other    *direction

	// Guarded by s.mu.
	ended    bool // src sent its end, which was passed on
	waiting  bool // moves nothing any more; reads src until the other direction ended
	draining bool // dst takes nothing any more
}

// abort resets both sides, which ends both directions. The first cause stays.
func (s *splice) abort(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.aborted {
		return
	}
	s.aborted = true
	if s.err == nil {
		s.err = cause
	}
	Reset(s.dirs[0].src)
	Reset(s.dirs[1].src)
}

func (d *direction) run() {
	readErr, writeErr := d.copy()
	switch {
	case writeErr != nil:
		d.drain(writeErr)
	case errors.Is(readErr, io.EOF):
		d.end()
	default:
		d.s.abort(readErr)
	}
}

// end passes the end of src on.
func (d *direction) end() {
	closeWrite(d.dst)
	s := d.s
	s.mu.Lock()
	d.ended = true
	if d.other.waiting {
		// It waits on our dst: give what that still sends a moment, or end the wait.
		deadline := past
		if d.other.draining {
			deadline = time.Now().Add(drainTime)
		}
		_ = d.dst.SetReadDeadline(deadline)
	}
	if d.other.ended || d.other.waiting || s.aborted {
		s.mu.Unlock()
		return
	}
	d.waiting = true
	s.mu.Unlock()
	// The other direction goes on. Nobody reads src any more, so watch for its reset.
	if err := awaitReset(d.src); err != nil {
		s.abort(err)
	}
}

// drain takes what src sends and drops it, since dst takes nothing any more,
// until the other direction has delivered what dst still had to say.
func (d *direction) drain(cause error) {
	s := d.s
	s.mu.Lock()
	d.waiting, d.draining = true, true
	if s.err == nil {
		s.err = cause
	}
	if d.other.ended {
		_ = d.src.SetReadDeadline(time.Now().Add(drainTime))
	}
	hopeless := d.other.draining // neither side takes anything
	s.mu.Unlock()
	if hopeless {
		s.abort(cause)
		return
	}

	buf := smallBuffers.Get().(*[smallBuffer]byte)
	defer smallBuffers.Put(buf)
	var err error
	for err == nil {
		_, err = d.src.Read(buf[:])
	}
	if !errors.Is(err, io.EOF) {
		s.abort(cause) // still sending, or gone as well: a reset tells it
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d.ended = true
	if d.other.waiting { // on dst, which may never say more
		_ = d.dst.SetReadDeadline(past)
	}
}

// copy moves bytes until a read or a write fails.
func (d *direction) copy() (readErr, writeErr error) {
	small := smallBuffers.Get().(*[smallBuffer]byte)
	defer smallBuffers.Put(small)
	var large *[largeBuffer]byte
	defer func() {
		if large != nil {
			largeBuffers.Put(large)
		}
	}()
	buf := small[:]
	inKernel := canSplice(d.dst, d.src)
	for moved := 0; ; {
		n, err := d.src.Read(buf)
		if n > 0 {
			w, werr := d.dst.Write(buf[:n])
			d.moved.Add(uint64(max(w, 0)))
			if werr != nil {
				return nil, werr
			}
			moved += n
		}
		switch {
		case err != nil:
			return err, nil
		case inKernel && moved >= spliceAfter:
			if large != nil {
				largeBuffers.Put(large)
				large = nil
			}
			return d.copyInKernel()
		case large == nil && n == len(buf):
			large = largeBuffers.Get().(*[largeBuffer]byte)
			buf = large[:]
		case large != nil && n < smallBuffer:
			largeBuffers.Put(large)
			large, buf = nil, small[:]
		}
	}
}

// canSplice reports whether the net package moves bytes from src to dst within
// the kernel.
func canSplice(dst, src net.Conn) bool {
	if runtime.GOOS != "linux" {
		return false
	}
	_, srcTCP := src.(*net.TCPConn)
	_, dstTCP := dst.(*net.TCPConn)
	_, srcUnix := src.(*net.UnixConn)
	_, dstUnix := dst.(*net.UnixConn)
	return srcTCP && (dstTCP || dstUnix) || srcUnix && dstTCP
}

// copyInKernel moves the rest of the direction by splice(2).
func (d *direction) copyInKernel() (readErr, writeErr error) {
	for {
		var n int64
		var err error
		if dst, ok := d.dst.(*net.TCPConn); ok {
			n, err = dst.ReadFrom(&io.LimitedReader{R: d.src, N: spliceChunk})
			if err == nil && n < spliceChunk {
				err = io.EOF
			}
		} else if n, err = d.src.(*net.TCPConn).WriteTo(d.dst); err == nil {
			err = io.EOF
		}
		d.moved.Add(uint64(n))
		switch {
		case err == nil:
		case errors.Is(err, syscall.EPIPE): // only a write gives it
			return nil, err
		default:
			return err, nil
		}
	}
}

// Reset closes c so that its peer sees a reset, not an end: RST on TCP, Reset on
// a link.Stream. Other connections are closed.
func Reset(c net.Conn) {
	if r, ok := c.(interface{ Reset() error }); ok {
		_ = r.Reset()
		return
	}
	if l, ok := c.(interface{ SetLinger(sec int) error }); ok {
		_ = l.SetLinger(0)
	}
	_ = c.Close()
}

// closeWrite ends the writing side. A peer that is gone already is found by the
// other direction.
func closeWrite(c net.Conn) {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
		return
	}
	_ = c.Close()
}
