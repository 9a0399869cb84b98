// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http/httptrace"
	"sync/atomic"
	"syscall"
)

// Attempts collects why no engine answered at the addresses where it was looked for.
type Attempts struct {
	errs []error
	// engine: somebody may listen, or it is not known. leftover: there is a socket, or
	// another host, that refuses.
	engine, leftover bool
}

// Add notes the error of one address. remote is whether it is no path of a socket.
func (a *Attempts) Add(err error, remote bool) {
	a.errs = append(a.errs, err)
	switch {
	case errors.Is(err, ErrRefused):
		a.leftover = true
	case remote || !errors.Is(err, fs.ErrNotExist):
		a.engine = true
	}
}

// Err returns all errors as one, which is an [ErrAbsent] or [ErrRefused] where nobody
// listens at any of the addresses.
func (a *Attempts) Err() error {
	err := errors.Join(a.errs...)
	switch {
	case a.engine:
		return errors.New(err.Error()) // not the ErrRefused of one address
	case a.leftover:
		return Refused(err)
	}
	return fmt.Errorf("%w: %w", ErrAbsent, err)
}

// Refused returns err as an [ErrRefused], with its own text.
func Refused(err error) error { return refusedError{err} }

type refusedError struct{ error }

func (e refusedError) Is(target error) bool { return target == ErrRefused }
func (e refusedError) Unwrap() error        { return e.error }

// Dialer dials for a client that hides the reason of a failure, or that dials with a
// context of its own.
type Dialer struct {
	trace   *httptrace.ClientTrace
	refused atomic.Bool
}

// NewDialer returns a Dialer that reports connections to the trace of a session's ctx.
func NewDialer(ctx context.Context) *Dialer { return &Dialer{trace: httptrace.ContextClientTrace(ctx)} }

// DialContext is like that of [net.Dialer].
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if d.trace != nil && httptrace.ContextClientTrace(ctx) == nil {
		ctx = httptrace.WithClientTrace(ctx, d.trace)
	}
	c, err := (&net.Dialer{}).DialContext(ctx, network, address)
	d.refused.Store(errors.Is(err, syscall.ECONNREFUSED))
	return c, err
}

// Refused reports whether nobody listened at the last dial.
func (d *Dialer) Refused() bool { return d.refused.Load() }
