// SPDX-License-Identifier: Apache-2.0

package own

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"syscall"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	acceptMin = 5 * time.Millisecond
	acceptMax = time.Second // between two attempts, so that a client waits no longer than that
)

// Serve calls handle with each connection that ln accepts, on the caller's
// goroutine; handle owns the connection. A lack of descriptors or memory is
// logged and waited for. Serve returns nil when ln is closed or ctx ends, and
// the error of a listener that can accept no more.
func Serve(ctx context.Context, ln net.Listener, log *slog.Logger, handle func(net.Conn)) error {
	pause := schedule.Backoff{Min: acceptMin, Max: acceptMax}
	warn := rate.Sometimes{Interval: time.Minute}
	for ctx.Err() == nil {
		conn, err := ln.Accept()
		switch {
		case err == nil:
			pause.Reset()
			handle(conn)
			continue
		case errors.Is(err, net.ErrClosed):
			return nil
		case !temporary(err):
			return err
		}
		warn.Do(func() { log.Warn("cannot accept connections; retrying", "address", ln.Addr().String(), "err", err) })
		_ = schedule.Sleep(ctx, pause.Next())
	}
	return nil
}

// temporary reports whether a later accept can succeed: resources are short, or
// only the one connection failed (accept(2), "Error handling").
func temporary(err error) bool {
	var t interface{ Temporary() bool }
	if errors.As(err, &t) && t.Temporary() {
		return true
	}
	for _, e := range []error{
		syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, syscall.EPROTO, syscall.ENETDOWN,
		syscall.ENOPROTOOPT, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EPERM,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
