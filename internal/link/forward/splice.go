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
	"time"

	"github.com/fairlead/fairlead/internal/link/trace"
)

const (
	// An idle direction holds a small buffer only; a large one is borrowed for as
	// long as reads fill the small one.
	smallBuffer = 4 << 10
	largeBuffer = 64<<10 - 12 // with yamux's header one frame of a link

	// head is the room in front of what is read, for the header of a chunk.
	head = ChunkHead

	// splice(2) needs a pipe, two descriptors. Only a direction that has moved this
	// much gets one, and tries again after as much if there was none.
	spliceAfter = 1 << 20

	// drainTime is how long we still read what one side sends to a side that no
	// longer receives, so that an answer under way is not destroyed by a reset.
	drainTime = time.Second

	// drainMax is how much of it is then dropped. A sender that is not held back and
	// sees no reset takes a truncated upload for a complete one.
	drainMax = 1 << 20

	// consumedTime bounds the wait for a write that may have got a reset which a
	// read then no longer sees.
	consumedTime = 100 * time.Millisecond
)

var (
	smallBuffers = sync.Pool{New: func() any { return new([head + smallBuffer]byte) }}
	largeBuffers = sync.Pool{New: func() any { return new([head + largeBuffer]byte) }}
)

// past is a deadline that has passed.
var past = time.Unix(1, 0)

// Meter counts the bytes that a splice moved, while it moves them. Several
// splices may share one.
type Meter struct {
	AToB, BToA atomic.Uint64
}

// Splice moves bytes between a and b until both directions ended, and closes
// both. The end of one direction is passed on by CloseWrite and leaves the other
// open for as long as it takes; a reset, any other failed read, and the end of
// ctx reset both (see Reset). A side that no longer takes bytes may still deliver:
// what it sends reaches the other side before the reset does. If it sent nothing,
// its end is a reset as well.
//
// TCP connections should be Abortive. One without CloseWrite ends in both
// directions at once. m may be nil. A flow that ctx carries (trace.With) is traced.
// Splice returns nil if both directions ended in order, else why not; it leaves
// no goroutine behind.
func Splice(ctx context.Context, a, b net.Conn, m *Meter) error {
	if m == nil {
		m = new(Meter)
	}
	s, flow := &splice{}, trace.From(ctx)
	s.dirs[0] = direction{s: s, src: a, dst: b, moved: &m.AToB, flow: flow, to: trace.ToGuest, other: &s.dirs[1], copied: make(chan struct{})}
	s.dirs[1] = direction{s: s, src: b, dst: a, moved: &m.BToA, flow: flow, to: trace.ToHost, other: &s.dirs[0], copied: make(chan struct{})}

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
		CloseOrderly(a)
		CloseOrderly(b)
	}
	return s.err
}

type splice struct {
	dirs [2]direction

	mu      sync.Mutex
	aborted bool
	over    chan struct{} // closed when aborted; nil if nobody waits
	err     error
}

// direction moves what src sends to dst.
type direction struct {
	s        *splice
	src, dst net.Conn
	moved    *atomic.Uint64
	flow     *trace.Flow // nil if it is not traced
	to       trace.Direction
	other    *direction

	stall  stall
	sent   atomic.Bool   // src sent something that dst took
	ending atomic.Bool   // set before the end of src is passed on
	copied chan struct{} // closed when copy returned
	broken error         // a failed read, or dst's reset; written before copied is closed

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
	if s.over != nil {
		close(s.over)
	}
	Reset(s.dirs[0].src)
	Reset(s.dirs[1].src)
}

func (d *direction) run() {
	d.stall.check = d.stalled
	readErr, writeErr := d.copy()
	atEnd := errors.Is(readErr, io.EOF)
	switch {
	case errors.Is(writeErr, errConnReset):
		d.broken = writeErr
	case writeErr == nil && !atEnd:
		d.broken = readErr
	}
	close(d.copied)
	switch {
	case writeErr != nil:
		d.drain(writeErr)
	case !atEnd:
		d.s.abort(readErr)
	default:
		if err := d.consumedReset(); err != nil {
			d.s.abort(err)
			return
		}
		d.end()
	}
}

// consumedReset returns the reset of src, whose end was read, if the other direction
// has got it. The kernel reports a reset once: if a write gets it, reads return the
// end, as if all had been sent. A write that the peer's end came before fails
// with EPIPE.
func (d *direction) consumedReset() error {
	if hungUp(d.src) { // by a reset, which may just be in the other's hands
		select {
		case <-d.other.copied:
		case <-time.After(consumedTime):
		}
	}
	select {
	case <-d.other.copied:
		return d.other.broken
	default:
		return nil
	}
}

// truncated returns why dst's bytes were not all taken by src, which has ended and has
// sent nothing: its end would tell dst that they were. s.mu is held.
func (d *direction) truncated() error {
	if d.other.draining && !d.sent.Load() {
		return d.s.err
	}
	return nil
}

// end passes the end of src on.
func (d *direction) end() {
	s := d.s
	s.mu.Lock()
	err := d.truncated()
	s.mu.Unlock()
	if err != nil {
		s.abort(err)
		return
	}
	d.ending.Store(true)
	closeWrite(d.dst)
	s.mu.Lock()
	d.ended = true
	if err := d.truncated(); err != nil { // meanwhile
		s.mu.Unlock()
		s.abort(err)
		return
	}
	if d.other.waiting {
		// It waits on our dst: end the wait, after a moment if dst may still send.
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
	// The other direction continues. Nobody reads src any more, so watch for a reset.
	if err := AwaitReset(d.src); err != nil {
		s.abort(err)
	}
}

// drain takes what src sends and drops it, since dst takes nothing any more,
// until the other direction has delivered what dst still sends.
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
	neither := d.other.draining // side receives anything
	truncated := d.other.ended && d.other.truncated() != nil
	s.mu.Unlock()
	if neither || truncated {
		s.abort(cause)
		return
	}
	if !errors.Is(d.drop(), io.EOF) {
		s.abort(cause) // it still sends, or failed as well
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d.ended = true
	if d.other.waiting { // on dst, which may never send more
		_ = d.dst.SetReadDeadline(past)
	}
}

// drop reads src and drops what it sends, until a read fails. Once dst has ended, it
// drops drainMax at most, and then lets src wait for drainTime.
func (d *direction) drop() error {
	buf := smallBuffers.Get().(*[head + smallBuffer]byte)
	defer smallBuffers.Put(buf)
	for dropped := 0; dropped < drainMax; {
		n, err := d.src.Read(buf[:])
		if err != nil {
			return err
		}
		d.s.mu.Lock()
		if d.other.ended {
			dropped += n
		}
		d.s.mu.Unlock()
	}
	timer := time.NewTimer(drainTime)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.s.whenAborted():
	}
	return errTooMuch
}

var errTooMuch = errors.New("sender kept sending after the receiver closed")

// whenAborted returns a channel that is closed when the splice is aborted.
func (s *splice) whenAborted() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over == nil {
		s.over = make(chan struct{})
		if s.aborted {
			close(s.over)
		}
	}
	return s.over
}

// count counts bytes that dst took. b is nil if the kernel moved them.
func (d *direction) count(n int, b []byte) {
	d.moved.Add(uint64(n))
	d.flow.Moved(d.to, n, b)
}

// copy moves bytes until a read or a write fails.
func (d *direction) copy() (readErr, writeErr error) {
	defer d.stall.stop()
	small := smallBuffers.Get().(*[head + smallBuffer]byte)
	defer smallBuffers.Put(small)
	var large *[head + largeBuffer]byte
	defer func() {
		if large != nil {
			largeBuffers.Put(large)
		}
	}()
	buf := small[:]
	inKernel := canSplice(d.dst, d.src)
	to, _ := d.dst.(Stream)
	for moved := 0; ; {
		n, err := d.src.Read(buf[head:])
		if n > 0 {
			var werr error
			d.stall.begin()
			if to != nil {
				werr = to.WriteChunk(buf[:head+n])
			} else {
				_, werr = d.dst.Write(buf[head : head+n])
			}
			d.stall.end()
			if werr != nil {
				return nil, werr
			}
			d.count(n, buf[head:head+n])
			if moved == 0 {
				d.sent.Store(true)
			}
			moved += n
		}
		switch {
		case err != nil:
			return err, nil
		case inKernel && moved >= spliceAfter:
			if large != nil {
				largeBuffers.Put(large)
				large, buf = nil, small[:]
			}
			readErr, writeErr = d.copyInKernel()
			if !errors.Is(readErr, errNoPipe) {
				return readErr, writeErr
			}
			moved = 1
		case large == nil && head+n == len(buf):
			large = largeBuffers.Get().(*[head + largeBuffer]byte)
			buf = large[:]
		case large != nil && n < smallBuffer:
			largeBuffers.Put(large)
			large, buf = nil, small[:]
		}
	}
}

// ChunkHead is the room for a header that Stream.WriteChunk needs, in bytes.
const ChunkHead = 4

// Stream is a flow over a link that has a connection of its own, on which bytes
// run in chunks. Splice moves the payload of chunks within the kernel.
type Stream interface {
	net.Conn
	// Raw is the connection below.
	Raw() net.Conn
	// WriteChunk sends what follows the first ChunkHead bytes of frame, which it
	// overwrites.
	WriteChunk(frame []byte) error
	// NextChunk waits for payload and returns how much of it to read from Raw.
	NextChunk() (int, error)
	// Took reports how much was read from Raw, and translates the error of that.
	Took(n int, err error) error
	// BeginChunk announces n bytes. It puts a header into head, which has ChunkHead
	// bytes; that and the n bytes are then written to Raw. Wrote reports how much was,
	// header included, and translates the error of that.
	BeginChunk(head []byte, n int) error
	Wrote(n int, err error) error
	// AwaitReset waits, after the end was read, for a reset.
	AwaitReset() error
}

// raw is the connection that the kernel reads and writes for c.
func raw(c net.Conn) net.Conn {
	if v, ok := c.(Stream); ok {
		return v.Raw()
	}
	return c
}

// canSplice reports whether bytes move from src to dst within the kernel.
func canSplice(dst, src net.Conn) bool {
	if runtime.GOOS != "linux" {
		return false
	}
	dst, src = raw(dst), raw(src)
	_, srcTCP := src.(*net.TCPConn)
	_, dstTCP := dst.(*net.TCPConn)
	_, srcUnix := src.(*net.UnixConn)
	_, dstUnix := dst.(*net.UnixConn)
	return srcTCP && (dstTCP || dstUnix) || srcUnix && dstTCP
}

// errNoPipe means that there are no descriptors, or no memory, left for splice(2), or that it
// cannot move what is next.
var errNoPipe = errors.New("no pipe")

// Reset closes c so that its peer sees a reset, not an end: by its Reset method if
// it has one, by RST on TCP. Other connections are closed.
func Reset(c io.Closer) {
	if r, ok := c.(interface{ Reset() error }); ok {
		_ = r.Reset()
		return
	}
	if l, ok := c.(lingerer); ok {
		_ = l.SetLinger(0)
	}
	_ = c.Close()
}

// AwaitReset waits until c, whose end was read, is reset, and returns that error: by its
// AwaitReset method if it has one, on TCP by what Linux reports. It returns nil when the read
// deadline passes, and at once where nothing tells of a reset.
func AwaitReset(c net.Conn) error {
	if v, ok := c.(interface{ AwaitReset() error }); ok {
		return v.AwaitReset()
	}
	return awaitReset(c)
}

// closeWrite ends the writing side. A peer that is already gone is detected by the
// other direction.
func closeWrite(c net.Conn) {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
		return
	}
	_ = c.Close()
}
