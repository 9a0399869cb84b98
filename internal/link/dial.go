// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"time"

	"github.com/fairlead/fairlead/internal/hvsock"
)

// Dial connects to e and proves both ends to each other. A peer that was
// reached and refused, or refuses us, is a *RefusedError.
func Dial(ctx context.Context, e Endpoint, o Options) (Session, error) {
	d, err := NewDialer(e, o)
	if err != nil {
		return nil, err
	}
	return d.Dial(ctx)
}

// Dialer dials one endpoint, and remembers what it learned of the way there. It
// is safe for concurrent use.
type Dialer struct {
	e    Endpoint
	o    Options
	conn func(context.Context) (conn net.Conn, again dialFunc, err error)
}

// dialFunc connects to a place once more.
type dialFunc = func(context.Context) (net.Conn, error)

// always is how to dial a place that stays where it is.
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

// Dial makes one session; see [Dial].
func (d *Dialer) Dial(ctx context.Context) (Session, error) {
	conn, again, err := d.conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("dial link %s: %w", d.e, err)
	}
	s, err := establish(ctx, conn, d.o, dialler, &way{dial: again})
	if err != nil {
		return nil, fmt.Errorf("dial link %s: %w", d.e, err)
	}
	return s, nil
}

// How a Redialer waits between attempts.
const (
	redialMin = 200 * time.Millisecond
	redialMax = 10 * time.Second
)

// Redialer hands out one session after another by dialling: the counterpart of
// a Listener for the side that dials. It is used by one goroutine.
type Redialer struct {
	d    *Dialer
	log  *slog.Logger
	last Session
	wait time.Duration // before the next attempt
	said string        // the last failure that was logged
}

// NewRedialer returns a Redialer of e. It starts nothing.
func NewRedialer(e Endpoint, o Options) (*Redialer, error) {
	d, err := NewDialer(e, o)
	if err != nil {
		return nil, err
	}
	return &Redialer{d: d, log: d.o.Logger.With("endpoint", e.String())}, nil
}

// Accept waits for the end of the session it returned before, then dials until
// it succeeds: at once at first, later at growing pauses of up to 10 s. A peer
// that refuses us, or took another in our place, is not asked sooner. It fails
// only when ctx ends.
func (r *Redialer) Accept(ctx context.Context) (Session, error) {
	if r.last != nil {
		select {
		case <-r.last.Done():
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		var c *CloseError
		r.wait = redialMin
		if errors.As(r.last.Err(), &c) && c.Remote && c.Reason == ReasonReplaced {
			r.wait = redialMax
		}
		r.last = nil
	}
	for {
		if err := sleep(ctx, r.wait); err != nil {
			return nil, err
		}
		s, err := r.d.Dial(ctx)
		if err == nil {
			r.last, r.wait, r.said = s, 0, ""
			return s, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if r.said != err.Error() {
			r.said = err.Error()
			r.log.Warn("no link; trying on", "err", err)
		}
		var refused *RefusedError
		r.wait = min(max(2*r.wait, redialMin), redialMax)
		if errors.As(err, &refused) && refused.Code != RefusedLost && refused.Code != RefusedTimeout && refused.Code != RefusedBusy {
			r.wait = redialMax
		}
	}
}

// sleep waits for d, give or take a tenth so that peers do not march in step.
func sleep(ctx context.Context, d time.Duration) error {
	if d == 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d*9/10 + rand.N(d/5))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
