// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bufio"
	"context"
	"encoding/binary"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	muxRecord = 1 << 31              // in the header of a record of the multiplexer
	inboxSize = wire.MaxControlFrame // bytes of control messages that nobody has read, after which flows that are streams wait
	inboxEach = 128                  // bytes that a message takes beside its own

	recordHead = 4 // bytes of a record's header
)

// mixed is a connection of records, each with its length in front: control messages, which are
// written by whoever has one, and what the multiplexer reads and writes.
type mixed struct {
	net.Conn          // what the records are written to
	raw      net.Conn // the same, for writes that do not wait
	in       *bufio.Reader
	left     int // bytes of a record of the multiplexer that it has not read
	inbox    inbox
	done     chan struct{} // closed by Close
	once     sync.Once

	turn   chan struct{} // full while a record is written
	broken bool          // a record was written in part: nothing more can be
	prompt prompt

	mu  sync.Mutex
	end time.Time // when a write of the multiplexer ends, zero for never
}

// message is a control message, or why there are no more.
type message struct {
	body []byte
	err  error
}

// inbox holds the control messages that nobody has read.
type inbox struct {
	news, room schedule.Signal

	mu   sync.Mutex
	list []message
	size int // of list, in bytes
}

// size is how many bytes of an inbox a message takes.
func (m message) size() int { return inboxEach + len(m.body) }

// put reports whether there was room; room receives when there may be.
func (b *inbox) put(m message) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.list) > 0 && b.size+m.size() > inboxSize {
		return false
	}
	b.list, b.size = append(b.list, m), b.size+m.size()
	b.news.Notify()
	return true
}

// get returns the first message, if there is one; news receives when there may be.
func (b *inbox) get() (m message, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.list) == 0 {
		return m, false
	}
	m = b.list[0]
	b.list = slices.Delete(b.list, 0, 1)
	b.size -= m.size()
	b.room.Notify()
	return m, true
}

func newMixed(conn, raw net.Conn) *mixed {
	return &mixed{
		Conn: conn, raw: raw, in: bufio.NewReaderSize(conn, readBuffer), inbox: inbox{news: schedule.NewSignal(), room: schedule.NewSignal()},
		done: make(chan struct{}), turn: make(chan struct{}, 1),
	}
}

// Close ends all reads and writes.
func (c *mixed) Close() error {
	c.once.Do(func() { close(c.done) })
	return c.Conn.Close()
}

// Read is for the multiplexer. It puts aside the control messages on the way.
func (c *mixed) Read(p []byte) (int, error) {
	for c.left == 0 {
		head, err := c.in.Peek(recordHead)
		if err != nil {
			return 0, err
		}
		if n := binary.BigEndian.Uint32(head); n >= muxRecord {
			c.left = int(n - muxRecord)
			_, _ = c.in.Discard(recordHead)
			continue
		}
		body, err := wire.ReadControl(c.in)
		for !c.inbox.put(message{body, err}) {
			select {
			case <-c.inbox.room:
			case <-c.done:
				return 0, net.ErrClosed
			}
		}
		if err != nil { // out of step: whoever reads the message ends the session
			<-c.done
			return 0, err
		}
	}
	n, err := c.in.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}

// records are buffers to write from.
var records = sync.Pool{New: func() any { return new([]byte) }}

// Write is for the multiplexer.
func (c *mixed) Write(p []byte) (int, error) {
	c.mu.Lock()
	end := c.end
	c.mu.Unlock()
	ctx, cancel := context.Background(), context.CancelFunc(func() {})
	if !end.IsZero() {
		ctx, cancel = context.WithDeadline(ctx, end)
	}
	err := c.take(ctx)
	cancel()
	if err != nil {
		return 0, err
	}
	b := records.Get().(*[]byte)
	defer records.Put(b)
	*b = append(binary.BigEndian.AppendUint32((*b)[:0], uint32(muxRecord+len(p))), p...)
	_ = c.Conn.SetWriteDeadline(end)
	if err := c.write(*b, false); err != nil {
		return 0, err
	}
	return len(p), nil
}

// SetWriteDeadline is for the multiplexer.
func (c *mixed) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.end = t
	return nil
}

// take waits for the turn to write.
func (c *mixed) take(ctx context.Context) error {
	select {
	case c.turn <- struct{}{}:
		return nil
	default:
	}
	select {
	case c.turn <- struct{}{}:
		return nil
	case <-c.done:
		return net.ErrClosed
	case <-ctx.Done():
		return os.ErrDeadlineExceeded
	}
}

// write writes a record, or the rest of one that was begun, and ends the turn.
func (c *mixed) write(b []byte, begun bool) error {
	defer func() { <-c.turn }()
	if c.broken {
		return net.ErrClosed
	}
	n, err := c.Conn.Write(b)
	c.broken = err != nil && (n > 0 || begun)
	return err
}

// control is the Control of a session.
type control struct {
	c *mixed
	s *session

	writing sync.Mutex
	owed    bool // Try wrote a part of a message, and has the turn until it is whole
}

func (k *control) Read(ctx context.Context) ([]byte, error) {
	for {
		if m, ok := k.c.inbox.get(); ok {
			return m.body, m.err
		}
		select {
		case <-k.c.inbox.news:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-k.s.Done():
			return nil, k.s.Err()
		}
	}
}

func (k *control) Write(ctx context.Context, frame []byte) error {
	k.writing.Lock()
	defer k.writing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, wire.WriteTimeout)
	defer cancel()
	if !k.owed {
		if err := k.c.take(ctx); err != nil {
			return err
		}
	}
	begun := k.owed
	k.owed = false
	end, _ := ctx.Deadline()
	_ = k.c.Conn.SetWriteDeadline(end)
	stop := context.AfterFunc(ctx, func() { _ = k.c.Conn.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	return k.c.write(frame, begun)
}

func (k *control) Try(frame []byte) []byte {
	if !k.writing.TryLock() {
		return frame
	}
	defer k.writing.Unlock()
	select {
	case k.c.turn <- struct{}{}:
	default:
		return frame
	}
	n := 0
	if !k.c.broken {
		_ = k.c.Conn.SetWriteDeadline(time.Time{}) // one that has passed would fail it
		n = k.c.prompt.write(k.c.raw, frame)
	}
	if k.owed = n > 0 && n < len(frame); !k.owed {
		<-k.c.turn
	}
	return frame[n:]
}
