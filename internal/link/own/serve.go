// SPDX-License-Identifier: Apache-2.0

package own

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	acceptMin = 5 * time.Millisecond
	acceptMax = time.Second // between two attempts, so that a client waits no longer than that
)

// Acceptor accepts the connections of any number of listeners, which share one
// warning a minute. Make one with NewAcceptor; it is safe for concurrent use.
type Acceptor struct {
	log     *slog.Logger
	use     Use
	scarce  func(conn any, use Use) bool
	warn    rate.Sometimes
	refused atomic.Uint64
	idle    time.Duration // how long a listener keeps its goroutine without a connection
	waiter  waiter        // for idle listeners
}

// NewAcceptor returns an acceptor of connections for one use.
func NewAcceptor(log *slog.Logger, use Use) *Acceptor {
	return &Acceptor{log: log, use: use, scarce: Scarce, warn: rate.Sometimes{Interval: time.Minute}, idle: idleAfter}
}

// Refused returns how many connections were reset because too few file
// descriptors were left.
func (a *Acceptor) Refused() uint64 { return a.refused.Load() }

// Serve calls handle with each connection that ln accepts, on the caller's
// goroutine; handle owns the connection. Connections are reset while too few
// file descriptors are left. A lack of memory is waited for. Serve returns nil
// when ln is closed or ctx ends, and the error of a listener that can accept no
// more.
func (a *Acceptor) Serve(ctx context.Context, ln net.Listener, handle func(net.Conn)) error {
	pause := schedule.Backoff{Min: acceptMin, Max: acceptMax}
	for ctx.Err() == nil {
		conn, err := ln.Accept()
		switch kind := kindOf(err); {
		case err == nil && a.scarce(conn, a.use):
			a.Refuse(ln, conn)
		case err == nil:
			pause.Reset()
			handle(conn)
		case errors.Is(err, net.ErrClosed):
			return nil
		case kind == connectionError: // it was first in the queue; the next one may be well
			pause.Reset()
		case kind == shortage:
			a.warn.Do(func() {
				a.log.Warn("cannot accept connections; retrying", "address", ln.Addr().String(), "err", err)
			})
			_ = schedule.Sleep(ctx, pause.Next())
		default:
			return err
		}
	}
	return nil
}

// Refuse resets a connection that ln accepted, as too few file descriptors are left.
func (a *Acceptor) Refuse(ln net.Listener, conn net.Conn) {
	if l, ok := conn.(interface{ SetLinger(sec int) error }); ok {
		_ = l.SetLinger(0) // a reset
	}
	_ = conn.Close()
	a.refused.Add(1)
	a.warn.Do(func() {
		a.log.Warn("refusing connections: too few file descriptors left", "address", ln.Addr().String(), "limit", Descriptors())
	})
}

// acceptError is the kind of an error of accept.
type acceptError uint8

const (
	listenerError   acceptError = iota // the listener can accept no more
	shortage                           // of descriptors, memory or the network: a later accept can succeed
	connectionError                    // of the one connection, which is out of the queue
)

func kindOf(err error) acceptError {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return listenerError
	}
	if kind, ok := acceptErrors[errno]; ok {
		return kind
	}
	if errno.Temporary() {
		return shortage
	}
	return listenerError
}

// InUse reports whether listening failed because the address is in use.
func InUse(err error) bool { return errors.Is(err, errInUse) }
