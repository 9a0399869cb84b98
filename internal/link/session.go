// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/libp2p/go-yamux/v5"

	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/wire"
)

const (
	acceptBacklog = 256              // streams opened and not yet accepted; the peer's Open waits beyond
	writeTimeout  = 30 * time.Second // to write one frame, and for the answer to a ping: a machine may be suspended for a while
	closeWait     = time.Second      // for a peer to take the reason of a close
	lingerTime    = 5 * time.Second  // in which data after a stream's Close is discarded
)

// muxConfig tunes yamux. Its windows: 256 KiB is the least the specification
// knows, and enough where the round trip takes microseconds.
func muxConfig(o Options) *yamux.Config {
	c := yamux.DefaultConfig()
	c.AcceptBacklog = acceptBacklog
	c.EnableKeepAlive = true
	c.KeepAliveInterval = o.KeepAlive
	c.MeasureRTTInterval = 365 * 24 * time.Hour // once is enough, and no timer that wakes us
	c.ConnectionWriteTimeout = min(writeTimeout, o.KeepAlive)
	c.WriteCoalesceDelay = 0
	c.MaxStreamWindowSize = maxWindow
	c.MaxMessageSize = maxMessage
	c.ReadBufSize = 0 // mixed has a buffer
	c.LogOutput = muxLog{o.Logger}
	c.MaxIncomingStreams = 0
	if o.Role == RoleAgent {
		c.MaxIncomingStreams = uint32(o.MaxStreams)
	}
	return c
}

const (
	maxWindow  = 1 << 20  // bytes that one busy stream may have under way
	maxMessage = 64 << 10 // bytes of one frame, which a control message may wait for
	readBuffer = 4 << 10
)

// muxLog takes yamux's log lines. The peer can cause them, so they are debug logs.
type muxLog struct{ log *slog.Logger }

func (l muxLog) Write(b []byte) (int, error) {
	l.log.Debug("multiplexer", "line", strings.TrimSpace(string(b)))
	return len(b), nil
}

// lastWords is a connection on which what the peer sent before it closed can be
// read after a failed write: yamux closes at once after one, and the peer's reason
// would be lost.
type lastWords struct {
	net.Conn
	once sync.Once
	done chan struct{} // closed when a write need not wait
}

func (c *lastWords) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		t := time.NewTimer(closeWait)
		defer t.Stop()
		select {
		case <-c.done:
		case <-t.C:
		}
	}
	return n, err
}

// hurry lets a failed write return, as the reader reached the end or we close.
func (c *lastWords) hurry() { c.once.Do(func() { close(c.done) }) }

func (c *lastWords) Close() error {
	c.hurry()
	return c.Conn.Close()
}

// session is a Session over yamux, beside which control messages have their own framing.
type session struct {
	conn     *lastWords
	records  *mixed
	mux      *yamux.Session
	role     Role
	peer     Peer
	control  *control
	incoming chan Stream
	o        Options
	dial     dialFunc // nil if flows have no connections of their own
	keys     flowKeys
	number   atomic.Uint64 // of the next flow that we begin
	used     numbers       // by the peer

	once sync.Once
	err  error // of the first close

	mu     sync.Mutex // guards what follows, and wg.Add against wg.Wait
	closed bool
	flows  map[*flowConn]struct{} // nil once the session ended
	wg     sync.WaitGroup
}

// newSession starts multiplexing.
func newSession(conn net.Conn, o Options, d direction, peer Peer, w *flowSource, keys flowKeys) (*session, error) {
	start := yamux.Server
	if d == dialler {
		start = yamux.Client
	}
	last := &lastWords{Conn: conn, done: make(chan struct{})}
	records := newMixed(last, conn)
	mux, err := start(records, muxConfig(o), new(budget).span)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errInternal, err)
	}
	s := &session{
		conn: last, records: records, mux: mux, role: o.Role, peer: peer, incoming: make(chan Stream), o: o,
		keys: keys, flows: make(map[*flowConn]struct{}),
	}
	forget := func() {}
	switch {
	case s.role == RoleHost:
		s.dial = w.dial
	case w.in != nil:
		w.in.serves(s)
		forget = func() { w.in.forget(s) }
	}
	s.control = &control{c: records, s: s}
	s.wg.Go(func() {
		<-s.Done()
		forget()
		s.endFlows()
	})
	if s.role == RoleAgent {
		s.wg.Go(s.accept)
	}
	return s, nil
}

// enter adds a flow, unless the session has ended or has limit flows already; it
// ends with the session.
func (s *session) enter(c *flowConn, limit int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.flows == nil || len(s.flows) >= limit {
		return false
	}
	s.flows[c] = struct{}{}
	return true
}

func (s *session) forget(c *flowConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.flows, c)
}

// endFlows closes all flows, and lets no more begin.
func (s *session) endFlows() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.flows {
		_ = c.conn.Close()
	}
	s.flows = nil
}

// accept gives yamux's accept a context.
func (s *session) accept() {
	for {
		st, err := s.mux.AcceptStream()
		if err != nil {
			return
		}
		select {
		case s.incoming <- &stream{s: s, mux: st}:
		case <-s.Done():
			return
		}
	}
}

func (s *session) Control() Control      { return s.control }
func (s *session) Peer() Peer            { return s.peer }
func (s *session) Done() <-chan struct{} { return s.mux.CloseChan() }

func (s *session) Open(ctx context.Context) (Stream, error) {
	if s.role != RoleHost {
		return nil, errors.New("open stream: the agent opens no flows")
	}
	// yamux turns the end of ctx into a timeout, and keeps a stream that it began.
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("open stream: %w", err)
	}
	st, err := s.mux.OpenStream(ctx)
	if err != nil {
		if ctx.Err() != nil && !s.mux.IsClosed() {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("open stream: %w", s.mapError(err))
	}
	return &stream{s: s, mux: st}, nil
}

// maxConnections is how many flows of a session have connections of their own at
// once, each with a descriptor on both sides. Further ones are streams.
const maxConnections = 4096

// connectTime bounds one dial, which is usually immediate.
const connectTime = time.Second

func (s *session) Connect(ctx context.Context) (Stream, error) {
	s.mu.Lock()
	direct := s.dial != nil && len(s.flows) < maxConnections
	s.mu.Unlock()
	if !direct {
		return s.Open(ctx)
	}
	dctx, cancel := context.WithTimeout(ctx, connectTime)
	conn, err := s.dial(dctx)
	cancel()
	if err == nil && own.Scarce(conn, own.ForFlow) {
		err = errors.Join(own.ErrDescriptors, conn.Close())
	}
	if err != nil { // the peer's queue is full, or no descriptors: the session continues
		s.o.Logger.Debug("flow has no connection of its own", "err", err)
		return s.Open(ctx)
	}
	if _, err := admit(conn, s.o, dialler); err != nil {
		return nil, errors.Join(fmt.Errorf("connect flow: %w", err), conn.Close())
	}
	o := wire.Opening{Session: s.keys.id, Number: s.number.Add(1)}
	copy(o.MAC[:], s.keys.sum(byHost, o.Number))
	c := &flowConn{conn: conn, s: s, opening: o.Append(nil), expect: s.keys.sum(byAgent, o.Number)}
	if !s.enter(c, math.MaxInt) {
		return nil, errors.Join(fmt.Errorf("connect flow: %w", s.Err()), conn.Close())
	}
	return c, nil
}

func (s *session) Accept(ctx context.Context) (Stream, error) {
	if s.role != RoleAgent {
		return nil, errors.New("accept stream: the host only opens flows")
	}
	select {
	case st := <-s.incoming:
		return st, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("accept stream: %w", ctx.Err())
	case <-s.Done():
		return nil, fmt.Errorf("accept stream: %w", s.Err())
	}
}

func (s *session) Err() error {
	select {
	case <-s.Done():
	default:
		return nil
	}
	_, err := s.mux.OpenStream(context.Background()) // of a closed session: only its error
	return closeError(err)
}

func (s *session) Close() error { return s.CloseWith(ReasonShutdown) }

func (s *session) CloseWith(r Reason) error {
	s.once.Do(func() {
		// yamux waits for the frame being written, which a stalled peer does not take.
		s.conn.hurry()
		stall := time.AfterFunc(closeWait, func() { _ = s.records.Close() })
		s.err = s.mux.CloseWithError(uint32(r))
		stall.Stop()
		s.mu.Lock()
		s.closed = true
		s.mu.Unlock()
		s.wg.Wait()
	})
	return s.err
}

// Alive reports whether the peer of a session answers within a time.
func Alive(s Session, within time.Duration) bool {
	own, ok := s.(*session)
	if !ok {
		return s.Err() == nil
	}
	answered := make(chan bool, 1)
	go func() {
		_, err := own.mux.Ping()
		answered <- err == nil
	}()
	t := time.NewTimer(within)
	defer t.Stop()
	select {
	case ok := <-answered:
		return ok
	case <-t.C:
		return false
	}
}

// background runs f until the session ends. It reports whether f was started.
func (s *session) background(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.wg.Go(f)
	return true
}

// closeError translates the error with which a session ended.
func closeError(err error) error {
	var g *yamux.GoAwayError
	switch {
	case err == nil:
		return ErrClosed
	case errors.As(err, &g):
		r := Reason(g.ErrorCode)
		if r == 0 {
			r = ReasonShutdown
		}
		return &CloseError{Reason: r, Remote: g.Remote}
	case errors.Is(err, yamux.ErrKeepAliveTimeout), errors.Is(err, yamux.ErrConnectionWriteTimeout):
		return fmt.Errorf("%w: the peer stopped answering", ErrClosed)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: the peer closed the connection", ErrClosed)
	}
	return fmt.Errorf("%w: %w", ErrClosed, err)
}

// mapError turns an error of yamux into one of ours. The end of a stream, which only
// Read knows, is none: yamux returns io.EOF for a session whose connection ended.
func (s *session) mapError(err error) error {
	var reset *yamux.StreamError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.As(err, &reset):
		return ErrReset
	case errors.Is(err, yamux.ErrTimeout):
		return os.ErrDeadlineExceeded
	case err == yamux.ErrStreamReset: //nolint:errorlint // exactly: a lost session wraps it
		return ErrReset
	case errors.Is(err, yamux.ErrStreamClosed):
		return net.ErrClosed
	}
	select {
	case <-s.Done():
		return s.Err()
	default:
		return closeError(err)
	}
}

// stream is a Stream over yamux.
type stream struct {
	s      *session
	mux    *yamux.Stream
	ended  atomic.Bool // the peer's side was read to its end
	closed atomic.Bool

	// reading is held by the reader: yamux wakes only one, so that a second one
	// would miss the end.
	reading sync.Mutex
	// deadlines keeps a caller's deadline from prolonging a Read that Close ends.
	deadlines sync.Mutex
}

func (t *stream) Read(b []byte) (int, error) {
	t.reading.Lock()
	defer t.reading.Unlock()
	if t.closed.Load() {
		return 0, net.ErrClosed
	}
	n, err := t.mux.Read(b)
	if err == nil {
		return n, nil
	}
	// With bytes, it is the error of the window's update: the session was lost.
	end := n == 0 && err == io.EOF //nolint:errorlint // exactly: a lost session wraps it
	if end {
		t.ended.Store(true)
	}
	switch {
	case t.closed.Load():
		return n, net.ErrClosed
	case end:
		return 0, io.EOF
	}
	return n, t.s.mapError(err)
}

func (t *stream) Write(b []byte) (int, error) {
	n, err := t.mux.Write(b)
	if err == nil {
		return n, nil
	}
	return n, t.s.mapError(err)
}

func (t *stream) CloseWrite() error { return t.s.mapError(t.mux.CloseWrite()) }

func (t *stream) Reset() error { return t.s.mapError(t.mux.Reset()) }

// Close ends the writing side. In yamux the peer does not learn that nobody reads:
// it would write until the window is full and then wait for ever. So what it
// sends is discarded until it ends too, or for lingerTime.
func (t *stream) Close() error {
	t.deadlines.Lock()
	again := t.closed.Swap(true)
	t.deadlines.Unlock()
	if again {
		return nil
	}
	if t.ended.Load() {
		return t.s.mapError(t.mux.Close())
	}
	err := t.mux.CloseWrite()
	if err != nil {
		_ = t.mux.Reset()
		if errors.Is(t.s.mapError(err), ErrReset) {
			return nil // the other side was quicker: closed is closed
		}
		return t.s.mapError(err)
	}
	_ = t.mux.SetReadDeadline(time.Unix(1, 0)) // ends a Read under way
	if !t.s.background(t.linger) {
		return t.mux.Reset()
	}
	return nil
}

func (t *stream) linger() {
	t.reading.Lock() // once the Read under way has ended
	defer t.reading.Unlock()
	_ = t.mux.SetReadDeadline(time.Now().Add(lingerTime))
	var b [4096]byte
	for {
		if _, err := t.mux.Read(b[:]); err != nil {
			if err != io.EOF { //nolint:errorlint // exactly: a lost session wraps it
				_ = t.mux.Reset()
			}
			return
		}
	}
}

func (t *stream) LocalAddr() net.Addr                { return t.s.conn.LocalAddr() }
func (t *stream) RemoteAddr() net.Addr               { return t.s.conn.RemoteAddr() }
func (t *stream) SetDeadline(d time.Time) error      { return t.deadline(t.mux.SetDeadline, d) }
func (t *stream) SetReadDeadline(d time.Time) error  { return t.deadline(t.mux.SetReadDeadline, d) }
func (t *stream) SetWriteDeadline(d time.Time) error { return t.deadline(t.mux.SetWriteDeadline, d) }

func (t *stream) deadline(set func(time.Time) error, d time.Time) error {
	t.deadlines.Lock()
	defer t.deadlines.Unlock()
	if t.closed.Load() {
		return net.ErrClosed
	}
	return set(d)
}
