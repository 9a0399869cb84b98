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

	"github.com/fairlead/fairlead/internal/link/wire"
)

// flowConn is a Stream that has a connection of its own. The end of a direction is
// sent in a chunk (wire.ChunkHeader), so that nothing depends on what a transport
// makes of a half-close, and a peer that is killed does not look finished.
type flowConn struct {
	conn net.Conn
	s    *session

	// Guarded by reading.
	reading sync.Mutex
	early   []byte // received with the opening; read first
	expect  []byte // proof that the peer sends first, nil once it was read
	left    int    // bytes of the current chunk that were not read
	head    [wire.ChunkHeader]byte
	have    int   // bytes in head
	broken  error // of all further reads
	ended   atomic.Bool

	// Guarded by writing.
	writing  sync.Mutex
	opening  []byte // sent in front of the first chunk
	owed     int    // bytes of the current chunk that were not written; -1 after a failed write
	prompt   prompt
	finished atomic.Bool

	reset, closed atomic.Bool
	deadlines     sync.Mutex // keeps a caller's deadline from prolonging a Read that Close ends
}

var errNoFlow = errors.New("the agent did not accept the connection")

// inPlace is the smallest buffer into which all available bytes are read,
// including headers, which are then removed; for a smaller one each header is
// read by itself.
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

// take reads from the connection. c.reading is held.
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

// over returns the error of a read after the last byte.
func (c *flowConn) over() error {
	if c.broken != nil {
		return c.broken
	}
	return io.EOF
}

// strip removes the headers from b and returns how much payload is left in it.
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

// header handles c.head when it is complete.
func (c *flowConn) header() error {
	if c.ended.Load() {
		c.broken = fmt.Errorf("%w: the peer sends after its end", ErrReset)
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

// readHeader reads the proof if it is due and then, between chunks, no more than
// the next header.
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
			c.broken = refuse(RefusedProof, "the peer that answered does not have the session's key")
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

// failed translates an error of conn.
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

// Raw is the connection below, for moving payload within the kernel: what
// NextChunk returned is read from it, and a chunk that BeginChunk announced is written.
func (c *flowConn) Raw() net.Conn { return c.conn }

// NextChunk waits for payload and returns how much of it to read from Raw; io.EOF
// at the end. What the peer sent together with its opening is not in Raw any more,
// so payload among it is an error.
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

// Took reports that n bytes were read from Raw. err is why it was less than
// NextChunk returned; it is returned as Read would return it.
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
// sides had sent their end.
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

// WriteChunk sends what follows the first wire.ChunkHeader bytes of frame, which
// it overwrites, so that nothing is copied. It sends all or fails.
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

// TryChunk is WriteChunk of as much as the connection takes without waiting. It
// returns how much of frame was sent: nothing also during another write, or after
// a failed one. What is left of a chunk that was begun must be written to Raw and
// then reported to Wrote.
func (c *flowConn) TryChunk(frame []byte) int {
	if !c.writing.TryLock() {
		return 0
	}
	defer c.writing.Unlock()
	if c.owed != 0 || c.opening != nil || c.finished.Load() || len(frame) == wire.ChunkHeader {
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
	if c.opening != nil {
		b = append(c.opening, b...)
		c.opening = nil
	}
	if _, err := c.conn.Write(b); err != nil {
		c.owed = -1
		return c.failed(err)
	}
	return nil
}

// stopped returns the error of a write after the last one. c.writing is held.
func (c *flowConn) stopped() error {
	if c.finished.Load() && !c.reset.Load() {
		return net.ErrClosed
	}
	return c.failed(net.ErrClosed)
}

// BeginChunk announces n bytes, by a header that it puts into head. Both are written
// to Raw next.
func (c *flowConn) BeginChunk(head []byte, n int) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.owed != 0 || c.finished.Load() {
		return c.stopped()
	}
	if c.opening != nil {
		if err := c.write(nil); err != nil {
			return err
		}
	}
	wire.PutChunk(head, n)
	c.owed = wire.ChunkHeader + n
	return nil
}

// Wrote reports that n bytes were written to Raw, and err why not more. It is
// returned as Write would return it.
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
	// Set before the write: the peer may close as soon as it has read it.
	opening := c.opening
	c.opening = nil
	c.finished.Store(true)
	if _, err := c.conn.Write(append(opening, make([]byte, wire.ChunkHeader)...)); err != nil {
		return c.failed(err)
	}
	return nil
}

// Reset closes the connection, which is a reset for the peer unless both sides had
// sent their end.
func (c *flowConn) Reset() error {
	c.reset.Store(true)
	return c.closeConn()
}

func (c *flowConn) closeConn() error {
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
		_ = c.closeConn()
		if errors.Is(err, ErrReset) || errors.Is(err, net.ErrClosed) {
			return nil // the other side closed first
		}
		return err
	}
	if c.ended.Load() {
		return c.closeConn()
	}
	_ = c.conn.SetReadDeadline(time.Unix(1, 0)) // ends a Read under way
	if !c.s.background(c.linger) {
		return c.closeConn()
	}
	return nil
}

// linger discards what the peer still sends, so that what we sent is not lost by a
// reset.
func (c *flowConn) linger() {
	defer func() { _ = c.closeConn() }()
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
