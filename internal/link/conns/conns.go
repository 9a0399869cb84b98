// SPDX-License-Identifier: Apache-2.0

// Package conns bounds the connections of a listener, so that silent peers block nobody.
package conns

import (
	"context"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/net/netutil"

	"github.com/fairlead/fairlead/internal/link/own"
)

// Set is the connections of one listener on which no request is under way. Its limits are
// set before it is used.
type Set struct {
	// Most bounds the connections of the listener.
	Most int
	// Silent bounds those of them on which no request is under way. Beyond it the oldest is
	// closed for the newest.
	Silent int
	// SilentScarce is the same while few file descriptors are left.
	SilentScarce int

	scarce atomic.Bool // the last connection had one of the last descriptors

	mu     sync.Mutex
	silent []net.Conn // oldest first
}

// Limit returns l with at most Most connections.
func (c *Set) Limit(l net.Listener) net.Listener {
	return netutil.LimitListener(scarceListener{l, c}, c.Most)
}

// scarceListener records whether descriptors are scarce.
type scarceListener struct {
	net.Listener
	conns *Set
}

func (l scarceListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.conns.scarce.Store(own.Scarce(conn, own.ForControl))
	}
	return conn, err
}

// Changed is for http.Server.ConnState.
func (c *Set) Changed(conn net.Conn, now http.ConnState) {
	switch now {
	case http.StateNew, http.StateIdle:
		c.Enter(conn)
	case http.StateClosed, http.StateHijacked:
		c.Leave(conn)
	case http.StateActive: // when the first byte of a request was read; see Handler
	}
}

// Enter records that a connection is silent, and makes room for it.
func (c *Set) Enter(conn net.Conn) {
	most := c.Silent
	if c.scarce.Load() {
		most = c.SilentScarce
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.silent = append(c.silent, conn)
	c.trim(most)
}

// MakeRoom closes silent connections beyond SilentScarce, as few file descriptors are left.
func (c *Set) MakeRoom() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trim(c.SilentScarce)
}

// CloseOldest closes the connection that has been silent longest, and reports whether there
// was one.
func (c *Set) CloseOldest() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.silent) == 0 {
		return false
	}
	c.trim(len(c.silent) - 1)
	return true
}

// trim closes the oldest silent connections beyond most. c.mu is held.
func (c *Set) trim(most int) {
	for len(c.silent) > most {
		_ = c.silent[0].Close()
		c.silent = slices.Delete(c.silent, 0, 1)
	}
}

// Leave records that a connection is not silent any more.
func (c *Set) Leave(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.silent, conn); i >= 0 {
		c.silent = slices.Delete(c.silent, i, i+1)
	}
}

type connKey struct{}

// WithConn is for http.Server.ConnContext.
func WithConn(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, conn)
}

// Of returns the connection of a request's context, nil if WithConn did not make it.
func Of(ctx context.Context) net.Conn {
	conn, _ := ctx.Value(connKey{}).(net.Conn)
	return conn
}

// Handler records that a request is under way, and calls h.
func (c *Set) Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if conn := Of(r.Context()); conn != nil {
			c.Leave(conn)
		}
		h.ServeHTTP(w, r)
	})
}
