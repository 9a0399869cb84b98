// SPDX-License-Identifier: Apache-2.0

// Package replica keeps tables of a peer equal to tables of ours, and ours to those of the
// peer, over one connection.
//
// A table is sent as a snapshot and then by its changes, each from one generation to a later
// one. A large step comes in parts and is applied as one. A receiver that gets a step which does
// not fit its table asks for all tables anew. A table with Answers is sent together with the word
// that the table it answers was seen: a peer that reads "seen 7" has every answer to generation 7.
package replica

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Kind is one table that crosses the link. tables.go has all of them, a line each; the receiver
// gives a function that applies its steps.
type Kind[K comparable, V any] struct {
	Name     string
	Check    func(V) error // what a receiver refuses; a sender leaves it out
	CheckKey func(K) error
	// Max rows of MaxBytes in all are sent at most. A step that has more is refused. A row counts
	// as many bytes as its encoding, or as Size if that is not nil and more.
	Max, MaxBytes int
	Size          func(V) int
	// Acked has the receiver say what it has seen.
	Acked bool
	// Answers is the table of the peer that this one is about, empty for none. It is sent once
	// that one was received.
	Answers string
	// Rate, if not 0, is how many rows a second are sent, after the tables without a rate.
	// Those are sent at once, by whoever changed them.
	Rate int
}

// Conn carries messages between two peers; link.Control is one. Read and Write may be called at
// the same time.
type Conn interface {
	// Read returns the next message.
	Read(ctx context.Context) ([]byte, error)
	// Write sends a message with its header, within wire.WriteTimeout.
	Write(ctx context.Context, frame []byte) error
	// Try writes what of a message needs no waiting, and returns the rest. If that is shorter,
	// the next Write must be of it.
	Try(frame []byte) (rest []byte)
}

// Options of a Session.
type Options struct {
	// Patience is how long the peer may acknowledge nothing of what was sent; 60 s if 0.
	Patience time.Duration
	// Wait, if not nil, waits until the peer may have sent a message of so many rows and bytes.
	Wait func(ctx context.Context, rows, bytes int) error
	// After, if not nil, is called after each message, when all of it was applied.
	After func()
	// Fault, if not nil, is called with the mistake in a message that was dropped.
	Fault func(error)
	// Stats counts, over any number of sessions; nil counts nothing.
	Stats *Stats
}

// Stats are counts since the start.
type Stats struct {
	FramesIn, FramesOut, BytesIn, BytesOut atomic.Uint64
	Malformed                              atomic.Uint64 // messages that were dropped
	Resyncs                                atomic.Uint64 // requests of peers for all tables
	Snapshots, Changes                     atomic.Uint64 // whole tables, and changes, sent
}

// Why Run ended, beside the errors of the connection.
var (
	ErrProtocol = errors.New("protocol violated")             // the peer does what a correct one never does
	ErrSilent   = errors.New("the peer does not answer")      // or takes nothing
	errEnded    = errors.New("the session of tables is over") // no error
)

// The peer may send this many messages that are dropped, or ask for all tables as often, and
// one more each faultEvery.
const (
	maxFaults  = 30
	faultEvery = 10 * time.Second
)

// promptRows is how many rows are sent at most by whoever changed them.
const promptRows = 64

// Session is one connection, with the tables that it carries.
type Session struct {
	conn   Conn
	o      Options
	wake   schedule.Signal // there may be something to write
	faults *rate.Limiter
	part   int // rows of one message at most

	// state is held while a message is applied, and while what is to be sent is taken. So what
	// was seen and what came of it are taken together.
	state     sync.Mutex
	receivers map[string]receiver
	received  map[string]uint64 // generations of the peer's tables that were applied
	news      bool              // of received, to be sent
	resync    string            // why all tables are to be asked for, empty if they are not

	// out is held while something is written. What holds it may wait for the peer.
	out     sync.Mutex
	senders []sender
	tail    wire.Frame // what is sent with the last message of this round
	rest    []byte     // of a message that was begun
	armed   time.Time  // when the writer looks next
	broken  error      // ends the session
	runs    bool
}

// New returns a session without tables; see Send and Receive.
func New(conn Conn, o Options) *Session {
	if o.Patience == 0 {
		o.Patience = time.Minute
	}
	if o.Stats == nil {
		o.Stats = new(Stats)
	}
	return &Session{
		conn: conn, o: o, wake: schedule.NewSignal(), faults: rate.NewLimiter(rate.Every(faultEvery), maxFaults), part: partRows,
		receivers: make(map[string]receiver), received: make(map[string]uint64),
	}
}

// Changed has the session look whether what is partial has changed, and what may begin.
func (s *Session) Changed() { s.try() }

// Run exchanges tables until the connection or ctx ends, or the peer violates the protocol or
// is silent. It may be called once. Nothing is called any more when it has returned.
func (s *Session) Run(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	s.out.Lock()
	s.runs = true
	s.out.Unlock()
	s.wake.Notify()
	var writing sync.WaitGroup
	writing.Go(func() {
		if err := s.write(ctx); err != nil {
			stop(err)
		}
	})
	err := s.read(ctx)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	stop(errEnded)
	writing.Wait()
	s.out.Lock()
	defer s.out.Unlock()
	s.runs = false
	for _, t := range s.senders {
		t.close()
	}
	return err
}

// read applies the messages of the peer.
func (s *Session) read(ctx context.Context) error {
	for {
		b, err := s.conn.Read(ctx)
		switch {
		case errors.Is(err, wire.ErrTooLarge):
			s.o.Stats.Malformed.Add(1)
			return fmt.Errorf("%w: %w", ErrProtocol, err)
		case err != nil:
			return err
		}
		s.o.Stats.FramesIn.Add(1)
		s.o.Stats.BytesIn.Add(uint64(len(b)))
		if err = s.take(ctx, b); errors.Is(err, wire.ErrMalformed) {
			err = s.fault(err)
		}
		if err != nil {
			return err
		}
		s.try()
	}
}

// fault drops a message, and asks for all tables anew.
func (s *Session) fault(err error) error {
	s.o.Stats.Malformed.Add(1)
	if s.o.Fault != nil {
		s.o.Fault(err)
	}
	if !s.faults.Allow() {
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	s.state.Lock()
	defer s.state.Unlock()
	for _, r := range s.receivers {
		r.reset()
	}
	s.resync = wire.Text(err.Error())
	return nil
}

// take applies one message.
func (s *Session) take(ctx context.Context, b []byte) error {
	f, err := wire.DecodeFrame(b)
	var r receiver
	var rows any
	n := 0
	if err == nil && f.Table != "" {
		if r = s.receivers[f.Table]; r == nil {
			err = wire.Malformed("a table that this side does not receive: %q", f.Table)
		} else {
			rows, n, err = r.decode(&f)
		}
	}
	if s.o.Wait != nil {
		if err := s.o.Wait(ctx, n, len(b)); err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	if f.Resync != "" {
		s.o.Stats.Resyncs.Add(1)
		if !s.faults.Allow() {
			return fmt.Errorf("%w: it asks for all tables too often", ErrProtocol)
		}
		for _, t := range s.senders {
			t.restart()
		}
	}
	s.state.Lock()
	defer s.state.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.news = s.news || f.Resync != "" // the peer may have lost what it was told
	if r != nil {
		done, err := r.apply(&f, rows)
		if err != nil {
			return err
		}
		if done {
			s.received[f.Table] = f.Generation
			s.news = s.news || r.acked()
		}
	}
	if err := s.seen(f.Seen); err != nil {
		return err
	}
	if s.o.After != nil {
		s.o.After()
	}
	return nil
}

func (s *Session) seen(list []wire.Seen) error {
	for _, v := range list {
		i := slices.IndexFunc(s.senders, func(t sender) bool { return t.name() == v.Table })
		if i < 0 {
			return wire.Malformed("has seen a table that was not sent: %q", v.Table)
		}
		if err := s.senders[i].seen(v.Generation, time.Now()); err != nil {
			return err
		}
	}
	return nil
}

// write sends what try leaves to it, until ctx ends.
func (s *Session) write(ctx context.Context) error {
	for ctx.Err() == nil {
		due, err := s.flush(ctx)
		if err != nil {
			return err
		}
		_ = schedule.Wait(ctx, due, s.wake)
	}
	return nil
}

// flush sends all that there is, and returns when there is more to do.
func (s *Session) flush(ctx context.Context) (due time.Time, err error) {
	s.out.Lock()
	defer s.out.Unlock()
	for s.broken == nil {
		now := time.Now()
		for _, t := range s.senders {
			if err := t.tick(now); err != nil {
				return due, err
			}
		}
		frame, err := s.rest, error(nil)
		if frame == nil {
			s.state.Lock()
			s.gather()
			s.state.Unlock()
			if frame, err = s.next(now); frame == nil && err == nil {
				frame, err = s.nextPaced(now)
			}
		}
		if err != nil {
			return due, err
		}
		if frame == nil {
			s.armed = s.due(now)
			return s.armed, nil
		}
		if err := s.conn.Write(ctx, frame); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() == nil {
				err = fmt.Errorf("%w: %w", ErrSilent, err)
			}
			return due, err
		}
		s.rest = nil
	}
	return due, s.broken
}

// try sends what has changed if that needs no waiting, and leaves it to the writer otherwise.
func (s *Session) try() {
	if !s.out.TryLock() {
		s.wake.Notify()
		return
	}
	defer s.out.Unlock()
	if !s.runs {
		return
	}
	if s.rest != nil || s.under() || !s.state.TryLock() {
		s.wake.Notify()
		return
	}
	now := time.Now()
	s.gather()
	s.state.Unlock()
	rows := 0
	for _, t := range s.senders {
		rows += t.rest()
	}
	for rows <= promptRows {
		frame, err := s.next(now)
		if err != nil {
			s.broken = err
			break
		}
		if frame == nil {
			if due := s.due(now); due.IsZero() || !s.armed.IsZero() && !due.Before(s.armed) {
				return
			}
			break
		}
		if rest := s.conn.Try(frame); len(rest) > 0 {
			s.rest = rest
			break
		}
	}
	s.wake.Notify()
}

// under reports whether a round is under way.
func (s *Session) under() bool {
	return slices.ContainsFunc(s.senders, func(t sender) bool { return !t.paced() && t.under() })
}

// gather takes what there is to send at once, unless a round is under way. state is held.
func (s *Session) gather() {
	if s.under() || s.tail.Seen != nil || s.tail.Resync != "" {
		return
	}
	for _, t := range s.senders {
		if t.paced() {
			continue
		}
		if _, ok := s.received[t.answers()]; t.ready() && (ok || t.answers() == "") {
			t.begin()
		}
	}
	s.tail.Resync, s.resync = s.resync, ""
	if !s.news {
		return
	}
	s.news = false
	for name, generation := range s.received {
		if s.receivers[name].acked() {
			s.tail.Seen = append(s.tail.Seen, wire.Seen{Table: name, Generation: generation})
		}
	}
}

// next returns the next message of the round, nil if there is none.
func (s *Session) next(now time.Time) ([]byte, error) {
	f := &wire.Frame{}
	for _, t := range s.senders {
		if !t.paced() && t.under() {
			f = t.frame(now)
			break
		}
	}
	if !s.under() {
		f.Seen, f.Resync = s.tail.Seen, s.tail.Resync
		s.tail = wire.Frame{}
	}
	if f.Table == "" && f.Seen == nil && f.Resync == "" {
		return nil, nil
	}
	return s.encode(f)
}

// nextPaced returns a message of a table that has a rate, nil if there is none.
func (s *Session) nextPaced(now time.Time) ([]byte, error) {
	for _, t := range s.senders {
		if !t.paced() {
			continue
		}
		if due := t.due(now); !t.under() && !due.IsZero() && !now.Before(due) {
			t.begin()
		}
		if f := t.frame(now); f != nil {
			return s.encode(f)
		}
	}
	return nil, nil
}

func (s *Session) encode(f *wire.Frame) ([]byte, error) {
	b, err := wire.EncodeFrame(f)
	s.o.Stats.FramesOut.Add(1)
	s.o.Stats.BytesOut.Add(uint64(len(b)))
	return b, err
}

// due returns when time brings something to do, the zero time for never.
func (s *Session) due(now time.Time) (at time.Time) {
	for _, t := range s.senders {
		if d := t.due(now); !d.IsZero() && (at.IsZero() || d.Before(at)) {
			at = d
		}
	}
	return at
}
