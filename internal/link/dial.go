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
)

// Dial connects to e and proves both ends to each other. A peer that was
// reached and refused, or refuses us, is a *RefusedError.
func Dial(ctx context.Context, e Endpoint, o Options) (Session, error) {
	o, err := o.completeFor(e)
	if err != nil {
		return nil, err
	}
	conn, err := dialConn(ctx, e)
	if err != nil {
		return nil, fmt.Errorf("dial link %s: %w", e, err)
	}
	s, err := establish(ctx, conn, o, dialler)
	if err != nil {
		return nil, fmt.Errorf("dial link %s: %w", e, err)
	}
	return s, nil
}

func dialConn(ctx context.Context, e Endpoint) (net.Conn, error) {
	if e.Network == NetworkUnix {
		var d net.Dialer
		return d.DialContext(ctx, "unix", e.Path)
	}
	if e.CID == CIDAny {
		return nil, errors.New("context id any is only to listen on: name one, or host")
	}
	return dialVsock(ctx, e.CID, e.Port)
}

// How a Redialer waits between attempts.
const (
	redialMin = 200 * time.Millisecond
	redialMax = 10 * time.Second
)

// Redialer hands out one session after another by dialling: the counterpart of
// a Listener for the side that dials. It is used by one goroutine.
type Redialer struct {
	e    Endpoint
	o    Options
	log  *slog.Logger
	last Session
	wait time.Duration // before the next attempt
	said string        // the last failure that was logged
}

// NewRedialer returns a Redialer of e. It starts nothing.
func NewRedialer(e Endpoint, o Options) (*Redialer, error) {
	o, err := o.completeFor(e)
	if err != nil {
		return nil, err
	}
	return &Redialer{e: e, o: o, log: o.Logger.With("endpoint", e.String())}, nil
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
		s, err := Dial(ctx, r.e, r.o)
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
