// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/link/hvsock"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Dialer dials one endpoint, and remembers how it was reached. It is safe for
// concurrent use.
type Dialer struct {
	e    Endpoint
	o    Options
	conn func(context.Context) (conn net.Conn, again dialFunc, err error)
}

// dialFunc connects once more to an endpoint that was reached.
type dialFunc = func(context.Context) (net.Conn, error)

// always is for an endpoint whose address does not change.
func always(f dialFunc) func(context.Context) (net.Conn, dialFunc, error) {
	return func(ctx context.Context) (net.Conn, dialFunc, error) {
		conn, err := f(ctx)
		return conn, f, err
	}
}

// NewDialer returns a dialer of e. It starts nothing.
func NewDialer(e Endpoint, o Options) (*Dialer, error) {
	o, err := o.completeFor(e)
	if err != nil {
		return nil, err
	}
	d := &Dialer{e: e, o: o}
	switch {
	case e.Network == NetworkUnix:
		d.conn = always(func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "unix", e.Path) })
	case e.Network == NetworkHvsock:
		system, err := hvsock.NewSystem()
		if err != nil {
			return nil, fmt.Errorf("dial link %s: %w", e, err)
		}
		h, err := hvsock.NewDialer(system, e.Machine, e.Port)
		if err != nil {
			return nil, fmt.Errorf("dial link %s: %w", e, err)
		}
		d.conn = h.Dial
	case e.CID == CIDAny:
		return nil, fmt.Errorf("dial link %s: context id any is only to listen on: name one, or host", e)
	default:
		d.conn = always(func(ctx context.Context) (net.Conn, error) { return dialVsock(ctx, e.CID, e.Port) })
	}
	return d, nil
}

// Dial connects and proves both ends to each other. A peer that was reached and
// refused, or refuses us, is a *RefusedError. If the token cannot be read, the peer is
// left alone.
func (d *Dialer) Dial(ctx context.Context) (Session, error) {
	o := d.o
	if o.LoadToken != nil {
		token, err := o.LoadToken()
		if err != nil {
			return nil, fmt.Errorf("dial link %s: %w", d.e, err)
		}
		o.Token, o.LoadToken = token, nil
	}
	conn, again, err := d.conn(ctx)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			err = op.Err // without the address, which the endpoint has
		}
		if d.e.Network == NetworkVsock {
			err = explainVsock(err)
		}
		return nil, fmt.Errorf("dial link %s: %w", d.e, err)
	}
	s, err := establish(ctx, conn, o, dialler, &flowSource{dial: again})
	if err != nil {
		return nil, fmt.Errorf("dial link %s: %w", d.e, err)
	}
	return s, nil
}

// explainVsock adds to an error of connect(2) what it means for a virtual machine, where its
// own text does not say that.
func explainVsock(err error) error {
	for errno, means := range map[syscall.Errno]string{
		syscall.ENODEV:       "no machine that runs here has this CID",
		syscall.ECONNRESET:   "the machine runs, and nothing listens at this port of it",
		syscall.ETIMEDOUT:    "the machine does not answer: it is starting, or has no vsock",
		syscall.EAFNOSUPPORT: "this kernel has no vsock, load the module vhost_vsock",
	} {
		if errors.Is(err, errno) {
			return fmt.Errorf("%s: %w", means, err)
		}
	}
	return err
}

const (
	// redialMax is the longest pause of a Redialer.
	redialMax = 10 * time.Second
	// redialStable is how long a session lasts after which the next attempt is prompt.
	// Shorter ones count as failures, so that a peer which accepts and then closes is
	// not dialled again and again.
	redialStable = 10 * time.Second
)

// Redialer hands out one session after another by dialling: the counterpart of
// a Listener for the side that dials. It is used by one goroutine.
type Redialer struct {
	dial   func(context.Context) (Session, error)
	log    *slog.Logger
	last   Session
	since  time.Time // last began
	pause  schedule.Backoff
	wait   time.Duration // before the next attempt
	logged string        // the last failure
}

// NewRedialer returns a Redialer of e. It starts nothing.
func NewRedialer(e Endpoint, o Options) (*Redialer, error) {
	d, err := NewDialer(e, o)
	if err != nil {
		return nil, err
	}
	pause := schedule.Backoff{Min: 200 * time.Millisecond, Max: redialMax, Jitter: 0.1}
	return NewRedialerOf(d.Dial, pause, d.o.Logger.With("endpoint", e.String())), nil
}

// NewRedialerOf returns a Redialer that calls dial, with the pauses of pause after
// attempts that fail. It starts nothing.
func NewRedialerOf(dial func(context.Context) (Session, error), pause schedule.Backoff, log *slog.Logger) *Redialer {
	return &Redialer{dial: dial, log: log, pause: pause}
}

// Accept waits for the end of the session it returned before, then dials until
// it succeeds: at once at first, later at growing pauses, until a session lasted
// 10 s. A peer that refuses us, or whose session either side closed for another host or
// agent, is dialled again after the longest pause. Accept fails only when ctx ends.
func (r *Redialer) Accept(ctx context.Context) (Session, error) {
	if r.last != nil {
		select {
		case <-r.last.Done():
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if time.Since(r.since) >= redialStable {
			r.pause.Reset()
		}
		r.failed(r.last.Err())
		r.last = nil
	}
	for {
		if err := schedule.Sleep(ctx, r.wait); err != nil {
			return nil, err
		}
		s, err := r.dial(ctx)
		if err == nil {
			r.last, r.since, r.wait, r.logged = s, time.Now(), 0, ""
			return s, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if r.logged != err.Error() {
			r.logged = err.Error()
			r.log.Warn("link down; retrying", "err", err)
		}
		r.failed(err)
	}
}

// failed sets the pause after an attempt or a session ended with err. After a session that
// was closed here for another peer, an early one would only take its place.
func (r *Redialer) failed(err error) {
	var c *CloseError
	if Unwelcome(err) || (errors.As(err, &c) && c.Reason == ReasonReplaced) {
		r.wait = r.pause.Longest()
		return
	}
	r.wait = r.pause.Next()
}

// Unwelcome reports whether err is a peer's decision against us, so that another
// attempt soon is of no use: it refused us, or another peer has our place.
func Unwelcome(err error) bool {
	var c *CloseError
	if errors.As(err, &c) {
		return c.Remote && (c.Reason == ReasonReplaced || c.Reason == ReasonDuplicate)
	}
	var refused *RefusedError
	return errors.As(err, &refused) &&
		refused.Code != RefusedLost && refused.Code != RefusedTimeout && refused.Code != RefusedBusy
}
