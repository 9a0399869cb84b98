// SPDX-License-Identifier: Apache-2.0

package link

import (
	"crypto/hmac"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/wire"
)

// flowConn is a Stream that has a connection of its own. Its ends are said in
// chunks (wire.ChunkHeader), so that nothing depends on what a transport makes
// of a half-close, and whoever is killed is not taken for one who is done.
type flowConn struct {
	conn net.Conn
	s    *session

	// Reading. Only who reads touches these, and holds reading.
	reading sync.Mutex
	early   []byte // read before all else
	expect  []byte // proof that the peer sends first, nil once it was read
	left    int    // bytes of the present chunk that were not read
	head    [wire.ChunkHeader]byte
	have    int   // bytes in head
	broken  error // nothing can be read any more
	ended   atomic.Bool

	// Writing. Only who writes touches these, and holds writing.
	writing  sync.Mutex
	say      []byte // sent in front of the first chunk
	owed     int    // bytes of the present chunk that were not written; -1 after a failed write
	prompt   prompt
	finished atomic.Bool

	reset, closed atomic.Bool
	deadlines     sync.Mutex // keeps a caller's deadline from prolonging a Read that Close ends
}

var errNoFlow = errors.New("the agent did not take the connection")

// inPlace is the least room into which a read takes all that is there, headers
// too; with less it asks for each by itself.
const inPlace = 512

func (c *flowConn) Read(p []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if len(p) == 0 {
		return 0, nil
	}
	for {
		if c.closed.Load() {
			return 0, c.failed(net.ErrClosed)
		}
		if c.left == 0 && len(p) < inPlace || c.expect != nil {
			if err := c.readHeader(); err != nil {
				return 0, err
			}
		}
		if c.broken != nil || c.ended.Load() && c.left == 0 {
			return 0, c.over()
		}
		if c.left >= len(p) || len(p) < inPlace {
			n, err := c.take(p[:min(len(p), c.left)])
			c.left -= n
			if n > 0 {
				return n, nil
			}
			return 0, c.failed(err)
		}
		n, err := c.take(p)
		if n, perr := c.strip(p[:n]); n > 0 {
			return n, nil
		} else if perr != nil {
			return 0, perr
		}
		if err != nil {
			return 0, c.failed(err)
		}
	}
}

// take reads of the connection. c.reading is held.
func (c *flowConn) take(p []byte) (int, error) {
	if len(c.early) > 0 {
		n := copy(p, c.early)
		if c.early = c.early[n:]; len(c.early) == 0 {
			c.early = nil
		}
		return n, nil
	}
	return c.conn.Read(p)
}

// over is what a read says when no more will come.
func (c *flowConn) over() error {
	if c.broken != nil {
		return c.broken
	}
	return io.EOF
}

// strip takes the headers out of b and returns how much payload is left in it.
func (c *flowConn) strip(b []byte) (n int, err error) {
	for i := 0; i < len(b); {
		if c.left > 0 {
			m := min(c.left, len(b)-i)
			if n != i {
				copy(b[n:], b[i:i+m])
			}
			n, i, c.left = n+m, i+m, c.left-m
			continue
		}
		m := copy(c.head[c.have:], b[i:])
		c.have, i = c.have+m, i+m
		if err := c.header(); err != nil {
			return n, err
		}
	}
	return n, nil
}

// header takes in c.head when it is whole.
func (c *flowConn) header() error {
	if c.ended.Load() {
		c.broken = fmt.Errorf("%w: the peer goes on after its end", ErrReset)
		return c.broken
	}
	if c.have < len(c.head) {
		return nil
	}
	c.have = 0
	n, err := wire.Chunk(c.head)
	if err != nil {
		c.broken = fmt.Errorf("%w: %w", ErrReset, err)
		return c.broken
	}
	c.left = n
	if n == 0 {
		c.ended.Store(true)
	}
	return nil
}

// readHeader reads the proof if it is due, and then, between chunks, the next
// header and no more.
func (c *flowConn) readHeader() error {
	if c.broken != nil {
		return c.broken
	}
	if c.expect != nil {
		var b [wire.MACSize + wire.ChunkHeader]byte
		n, err := io.ReadAtLeast(c.conn, b[:], wire.MACSize)
		if err != nil {
			c.broken = fmt.Errorf("%w: %w", errNoFlow, c.failed(err))
			return c.broken
		}
		if !hmac.Equal(b[:wire.MACSize], c.expect) {
			c.broken = refuse(RefusedProof, "who answers for the agent does not know the session's key")
			return c.broken
		}
		c.expect = nil
		if _, err := c.strip(b[wire.MACSize:n]); err != nil {
			return err
		}
	}
	for c.left == 0 && c.broken == nil && !c.ended.Load() {
		n, err := c.take(c.head[c.have:])
		c.have += n
		if err != nil && n == 0 {
			return c.failed(err)
		}
		if err := c.header(); err != nil {
			return err
		}
	}
	return nil
}

// failed says why conn failed.
func (c *flowConn) failed(err error) error {
	switch {
	case c.reset.Load():
		return ErrReset
	case c.closed.Load():
		return net.ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		return err
	}
	select {
	case <-c.s.Done():
		return c.s.Err()
	default:
		return ErrReset
	}
}

// Raw is the connection beneath, for who moves payload within the kernel: reads
// of it what NextChunk says, and writes to it what BeginChunk announced.
func (c *flowConn) Raw() net.Conn { return c.conn }

// NextChunk waits for payload and returns how much of it is next to be read of
// Raw; io.EOF at the end. What the peer sent ahead with its opening can be had by
// Read alone: payload among it ends the flow.
func (c *flowConn) NextChunk() (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if err := c.readHeader(); err != nil {
		return 0, err
	}
	if c.left == 0 {
		return 0, c.over()
	}
	if len(c.early) > 0 {
		c.broken = fmt.Errorf("%w: payload ahead of the reply", wire.ErrMalformed)
		return 0, c.broken
	}
	return c.left, nil
}

// Took says that n bytes were read of Raw. err is why it was less than what was
// there, and is returned as Read would say it.
func (c *flowConn) Took(n int, err error) error {
	c.reading.Lock()
	defer c.reading.Unlock()
	c.left -= n
	if err == nil {
		return nil
	}
	return c.failed(err)
}

// AwaitReset waits, after the peer's end was read, until the peer resets the
// flow, and returns that error; nil when the read deadline passes, and when both
// sides had said their end.
func (c *flowConn) AwaitReset() error {
	c.reading.Lock()
	defer c.reading.Unlock()
	if c.broken != nil {
		return c.broken
	}
	var b [1]byte
	n, err := c.take(b[:])
	switch {
	case n > 0:
		c.have = 0
		return c.header()
	case errors.Is(err, os.ErrDeadlineExceeded), c.finished.Load(), c.closed.Load():
		return nil
	}
	return c.failed(err)
}

// Write sends p in chunks.
func (c *flowConn) Write(p []byte) (int, error) {
	frame := frames.Get().(*[]byte)
	defer frames.Put(frame)
	room := (*frame)[wire.ChunkHeader:]
	sent := 0
	for {
		n := copy(room, p[sent:])
		if n == 0 {
			return sent, nil
		}
		if err := c.WriteChunk((*frame)[:wire.ChunkHeader+n]); err != nil {
			return sent, err
		}
		sent += n
	}
}

// frames hold a chunk that is copied to be sent.
var frames = sync.Pool{New: func() any {
	b := make([]byte, 16<<10)
	return &b
}}

// WriteChunk sends what stands in frame behind wire.ChunkHeader bytes, which it
// fills: so nothing is copied. It sends all or fails.
func (c *flowConn) WriteChunk(frame []byte) error {
	n := len(frame) - wire.ChunkHeader
	if n == 0 {
		return nil
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	wire.PutChunk(frame, n)
	return c.write(frame)
}

// TryChunk is WriteChunk of as much as the connection takes at once. It returns
// how much of frame was sent: nothing as well where somebody else writes, or
// nothing can be written any more. What is left of a chunk that was begun must be
// written to Raw, and then told by Wrote.
func (c *flowConn) TryChunk(frame []byte) int {
	if !c.writing.TryLock() {
		return 0
	}
	defer c.writing.Unlock()
	if c.owed != 0 || c.say != nil || c.finished.Load() || len(frame) == wire.ChunkHeader {
		return 0
	}
	wire.PutChunk(frame, len(frame)-wire.ChunkHeader)
	n := c.prompt.write(c.conn, frame)
	if n > 0 {
		c.owed = len(frame) - n
	}
	return n
}

// write sends b, which is whole chunks. c.writing is held.
func (c *flowConn) write(b []byte) error {
	if c.owed != 0 || c.finished.Load() {
		return c.stopped()
	}
	if c.say != nil {
		b = append(c.say, b...)
		c.say = nil
	}
	if _, err := c.conn.Write(b); err != nil {
		c.owed = -1
		return c.failed(err)
	}
	return nil
}

// stopped says why nothing can be written any more. c.writing is held.
func (c *flowConn) stopped() error {
	if c.finished.Load() && !c.reset.Load() {
		return net.ErrClosed
	}
	return c.failed(net.ErrClosed)
}

// BeginChunk announces n bytes that are written to Raw next.
func (c *flowConn) BeginChunk(n int) error {
	var b [wire.ChunkHeader]byte
	wire.PutChunk(b[:], n)
	c.writing.Lock()
	defer c.writing.Unlock()
	if err := c.write(b[:]); err != nil {
		return err
	}
	c.owed = n
	return nil
}

// Wrote says that n bytes were written to Raw, and err why not more. It returns
// err as Write would say it.
func (c *flowConn) Wrote(n int, err error) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.owed -= n
	if err == nil {
		return nil
	}
	return c.failed(err)
}

func (c *flowConn) CloseWrite() error {
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.finished.Load() {
		return nil
	}
	if c.owed != 0 {
		return c.stopped()
	}
	// First noted, then said: the peer may hang up as soon as it has read it.
	say := c.say
	c.say = nil
	c.finished.Store(true)
	if _, err := c.conn.Write(append(say, make([]byte, wire.ChunkHeader)...)); err != nil {
		return c.failed(err)
	}
	return nil
}

// Reset closes the connection, which the peer takes for a reset unless both
// sides had said their end.
func (c *flowConn) Reset() error {
	c.reset.Store(true)
	return c.hangUp()
}

func (c *flowConn) hangUp() error {
	c.closed.Store(true)
	c.s.forget(c)
	if err := c.conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

func (c *flowConn) Close() error {
	c.deadlines.Lock()
	again := c.closed.Swap(true)
	c.deadlines.Unlock()
	if again {
		return nil
	}
	_ = c.conn.SetWriteDeadline(time.Now().Add(lingerTime))
	if err := c.CloseWrite(); err != nil {
		_ = c.hangUp()
		if errors.Is(err, ErrReset) || errors.Is(err, net.ErrClosed) {
			return nil // the other side was quicker: closed is closed
		}
		return err
	}
	if c.ended.Load() {
		return c.hangUp()
	}
	_ = c.conn.SetReadDeadline(time.Unix(1, 0)) // ends a Read under way
	if !c.s.background(c.linger) {
		return c.hangUp()
	}
	return nil
}

// linger throws away what the peer still sends, so that what we sent is not lost
// with it.
func (c *flowConn) linger() {
	defer func() { _ = c.hangUp() }()
	c.reading.Lock()
	defer c.reading.Unlock()
	_ = c.conn.SetReadDeadline(time.Now().Add(lingerTime))
	var b [4096]byte
	for !c.ended.Load() && c.broken == nil && c.expect == nil {
		n, err := c.take(b[:])
		if _, perr := c.strip(b[:n]); err != nil || perr != nil {
			return
		}
	}
}

func (c *flowConn) LocalAddr() net.Addr                { return c.conn.LocalAddr() }
func (c *flowConn) RemoteAddr() net.Addr               { return c.conn.RemoteAddr() }
func (c *flowConn) SetDeadline(d time.Time) error      { return c.deadline(c.conn.SetDeadline, d) }
func (c *flowConn) SetReadDeadline(d time.Time) error  { return c.deadline(c.conn.SetReadDeadline, d) }
func (c *flowConn) SetWriteDeadline(d time.Time) error { return c.deadline(c.conn.SetWriteDeadline, d) }

func (c *flowConn) deadline(set func(time.Time) error, d time.Time) error {
	c.deadlines.Lock()
	defer c.deadlines.Unlock()
	if c.closed.Load() {
		return net.ErrClosed
	}
	return set(d)
}
