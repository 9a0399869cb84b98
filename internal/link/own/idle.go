// SPDX-License-Identifier: Apache-2.0

package own

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// idleAfter is how long a listener keeps its goroutine without a connection.
const idleAfter = 5 * time.Second

// deadliner is a listener whose Accept can be bounded, and whose descriptor is known.
type deadliner interface {
	net.Listener
	syscall.Conn
	SetDeadline(t time.Time) error
}

// Start serves a listener as Serve does, on goroutines made by spawn. On Linux, a
// listener without connections has none: one goroutine waits for all. failed is called
// with the error of a listener that can accept no more, and what Start returns. Closing what Start returns closes the listener. ctx is that of all listeners
// of the acceptor: when it ends, idle ones are served no longer, and remain to be closed.
func (a *Acceptor) Start(ctx context.Context, ln net.Listener, spawn func(func()), handle func(net.Conn), failed func(listener io.Closer, err error)) io.Closer {
	s := &started{a: a, spawn: spawn, ln: ln, handle: handle, failed: failed}
	d, ok := ln.(deadliner)
	if ok && a.waiter.start(ctx, spawn) {
		s.ln = bounded{d, a.idle}
		if s.park(ctx) == nil {
			return s
		}
		s.ln = ln
	}
	spawn(func() { s.serve(ctx) })
	return s
}

// started is a listener that an acceptor serves.
type started struct {
	a      *Acceptor
	ln     net.Listener
	spawn  func(func())
	handle func(net.Conn)
	failed func(io.Closer, error)

	mu     sync.Mutex
	place  uint64 // in the waiter, 0 before it first waits
	closed bool
}

// bounded accepts connections that arrive in time.
type bounded struct {
	deadliner
	within time.Duration
}

func (b bounded) Accept() (net.Conn, error) {
	if err := b.SetDeadline(time.Now().Add(b.within)); err != nil {
		return nil, err
	}
	return b.deadliner.Accept()
}

// serve accepts connections until none arrives for a while.
func (s *started) serve(ctx context.Context) {
	err := s.a.Serve(ctx, s.ln, s.handle)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = s.park(ctx)
	}
	if err != nil {
		s.failed(s, err)
	}
}

// park has the waiter call serve when there is a connection.
func (s *started) park(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	c, err := s.ln.(syscall.Conn).SyscallConn()
	if err != nil {
		return err
	}
	s.place, err = s.a.waiter.wait(s.place, c, func() { s.spawn(func() { s.serve(ctx) }) })
	return err
}

// Close closes the listener.
func (s *started) Close() error {
	s.mu.Lock()
	s.closed = true
	s.a.waiter.forget(s.place)
	s.mu.Unlock()
	return s.ln.Close()
}
