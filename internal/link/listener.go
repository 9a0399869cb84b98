// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Listener accepts connections and hands out those that became proved sessions.
type Listener struct {
	e        Endpoint
	o        Options
	log      *slog.Logger
	ln       net.Listener
	acceptor *own.Acceptor
	ready    chan *session
	done     chan struct{} // closed when accepting ended
	wg       sync.WaitGroup

	mu       sync.Mutex
	started  bool
	closed   bool
	cancel   context.CancelFunc
	err      error                                 // why accepting ended
	unproved []*attempt                            // connections that have sent no opening yet, oldest first
	attempts []*attempt                            // handshakes under way, oldest first
	sessions map[[wire.SessionIDSize]byte]*session // that take flows
	refused  map[Refusal]uint64
	last     Refused // zero if no one was refused
	unlogged map[Refusal]unlogged
}

// Refused is a peer that was refused.
type Refused struct {
	At     time.Time
	Peer   string // its address
	Code   Refusal
	Detail string
}

// unlogged is how often one reason was not logged since it last was.
type unlogged struct {
	until time.Time
	count uint64
}

const refusalLogPause = 10 * time.Second // per reason

// Listen claims e. ctx bounds only that. A unix socket has mode 0600 in a
// directory that no one else may write to, made with mode 0700 if missing; with
// AllowUIDs 0666, in a directory that all may enter, and each peer's user is checked. A
// dead socket is replaced, a live one is an error. On vsock a port below 1024
// is recommended: others may be held by any process of the machine. The caller
// must Close the listener.
func Listen(ctx context.Context, e Endpoint, o Options) (*Listener, error) {
	o, err := o.completeFor(e)
	if err != nil {
		return nil, err
	}
	log := o.Logger.With("endpoint", e.String())
	var ln net.Listener
	switch e.Network {
	case NetworkUnix:
		ln, err = listenUnix(ctx, e.Path, len(o.AllowUIDs) > 0)
	case NetworkHvsock:
		err = errors.New("hyper-v sockets are only dialled: the guest listens at vsock://:PORT")
	default:
		ln, err = listenVsock(e.CID, e.Port)
		if err == nil && e.Port >= 1024 {
			log.Warn("vsock port is not privileged: when we are down any process can take it; a port below 1024 is better")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("listen on link %s: %w", e, err)
	}
	return newListener(e, o, log, ln), nil
}

func newListener(e Endpoint, o Options, log *slog.Logger, ln net.Listener) *Listener {
	return &Listener{
		e: e, o: o, log: log, ln: ln, acceptor: own.NewAcceptor(log, own.ForLink), ready: make(chan *session), done: make(chan struct{}),
		sessions: make(map[[wire.SessionIDSize]byte]*session),
		refused:  make(map[Refusal]uint64), unlogged: make(map[Refusal]unlogged),
	}
}

// Endpoint returns what is listened on.
func (l *Listener) Endpoint() Endpoint { return l.e }

// Accept waits for the next proved session. The first call starts accepting,
// which continues, with handshakes in parallel, until Close. It fails when ctx ends,
// when the listener is closed (net.ErrClosed) or cannot accept any more.
func (l *Listener) Accept(ctx context.Context) (Session, error) {
	l.start()
	select {
	case s := <-l.ready:
		return s, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-l.done:
		l.mu.Lock()
		defer l.mu.Unlock()
		return nil, fmt.Errorf("accept on link %s: %w", l.e, l.err)
	}
}

func (l *Listener) start() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.started || l.closed {
		return
	}
	l.started = true
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	l.wg.Go(func() { l.run(ctx) })
}

// Close stops listening, aborts handshakes under way and waits for their ends.
// Sessions that were handed out continue. It may be called more than once.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		l.wg.Wait()
		return nil
	}
	l.closed = true
	if l.started {
		l.cancel()
	} else {
		l.err = net.ErrClosed
		close(l.done)
	}
	l.mu.Unlock()
	err := l.ln.Close()
	l.wg.Wait()
	return err
}

// Refused returns how many peers were refused, by reason.
func (l *Listener) Refused() map[Refusal]uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	refused := maps.Clone(l.refused)
	if n := l.acceptor.Refused(); n > 0 {
		refused[RefusedBusy] += n
	}
	return refused
}

// LastRefused returns the last peer that was refused, zero if there was none. Peers that
// left by themselves do not count.
func (l *Listener) LastRefused() Refused {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

func (l *Listener) run(ctx context.Context) {
	defer close(l.done)
	err := l.acceptor.Serve(ctx, l.ln, func(conn net.Conn) { l.admit(ctx, conn) })
	if err == nil {
		err = net.ErrClosed
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = err
}

// attempt is a connection from accept until its session is handed out.
type attempt struct {
	cancel context.CancelCauseFunc
	since  time.Time
}

// openingTime is how long a connection has at least to send its opening. When too
// many wait for that, further ones stay in the system's queue.
const openingTime = 500 * time.Millisecond

// awaitRoom waits until there is room for one more connection, or the oldest has
// had its time.
func (l *Listener) awaitRoom(ctx context.Context) {
	for {
		l.mu.Lock()
		full := len(l.unproved) >= l.o.maxUnproved && time.Since(l.unproved[0].since) < l.o.openingTime
		l.mu.Unlock()
		if !full || schedule.Sleep(ctx, time.Millisecond) != nil {
			return
		}
	}
}

// admit starts the handshake of one connection.
func (l *Listener) admit(ctx context.Context, conn net.Conn) {
	ctx, cancel := context.WithCancelCause(ctx)
	l.awaitRoom(ctx)
	a := &attempt{cancel, time.Now()}
	l.mu.Lock()
	l.unproved = enter(l.unproved, a, l.o.maxUnproved)
	l.mu.Unlock()
	l.wg.Go(func() {
		defer cancel(nil)
		s, err := establish(ctx, conn, l.o, acceptor, &flowSource{in: &intake{l, a}})
		if err == nil && s != nil {
			err = l.hand(ctx, s)
		}
		l.mu.Lock()
		l.unproved, l.attempts = leave(l.unproved, a), leave(l.attempts, a)
		l.mu.Unlock()
		if err != nil {
			l.note(address(conn), err, time.Now())
		}
	})
}

// enter adds a to those under way; beyond the limit the oldest is closed.
func enter(in []*attempt, a *attempt, limit int) []*attempt {
	if len(in) >= limit {
		in[0].cancel(refuse(RefusedBusy, "%d peers at once; the oldest was closed", limit))
		in = slices.Delete(in, 0, 1)
	}
	return append(in, a)
}

func leave(in []*attempt, a *attempt) []*attempt {
	if i := slices.Index(in, a); i >= 0 {
		return slices.Delete(in, i, i+1)
	}
	return in
}

// hand gives s to Accept. While it waits it can be closed for a newer attempt.
func (l *Listener) hand(ctx context.Context, s *session) error {
	select {
	case l.ready <- s:
		return nil
	case <-s.Done():
		return refuse(RefusedLost, "the peer closed the session before it was served")
	case <-ctx.Done():
		_ = s.CloseWith(ReasonShutdown)
		return context.Cause(ctx)
	}
}

// note counts a refused peer, and logs it unless its reason was logged lately.
func (l *Listener) note(peer string, err error, now time.Time) {
	var r *RefusedError
	if !errors.As(err, &r) {
		return // we are closing
	}
	l.mu.Lock()
	l.refused[r.Code]++
	if r.Code != RefusedLost && r.Code != RefusedBusy {
		l.last = Refused{At: now, Peer: peer, Code: r.Code, Detail: r.Detail}
	}
	u := l.unlogged[r.Code]
	skip, skipped := now.Before(u.until), u.count
	if skip {
		u.count++
	} else {
		u = unlogged{until: now.Add(refusalLogPause)}
	}
	l.unlogged[r.Code] = u
	l.mu.Unlock()
	if skip {
		return
	}
	level := slog.LevelWarn
	if r.Code == RefusedLost {
		level = slog.LevelDebug // a probe whether the socket is served
	}
	l.log.Log(context.Background(), level, "peer refused", "peer", peer, "err", err, "unlogged", skipped)
}
