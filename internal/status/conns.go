// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/net/netutil"

	"github.com/fairlead/fairlead/internal/own"
)

const (
	// maxConns bounds the connections of one listener.
	maxConns = 256
	// maxSilent bounds those of them on which no request is under way. Beyond it the
	// oldest is closed for the newest, so that silent peers block nobody.
	maxSilent = 64
	// maxSilentScarce is the same while few file descriptors are left.
	maxSilentScarce = 4
)

// conns are the connections of one listener on which no request is under way.
type conns struct {
	scarce atomic.Bool // the last connection had one of the last descriptors

	mu     sync.Mutex
	silent []net.Conn // oldest first
}

// limit returns l with at most maxConns connections.
func (c *conns) limit(l net.Listener) net.Listener {
	return netutil.LimitListener(scarceListener{l, c}, maxConns)
}

// scarceListener records whether descriptors are scarce.
type scarceListener struct {
	net.Listener
	conns *conns
}

func (l scarceListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.conns.scarce.Store(own.Scarce(conn, own.ForControl))
	}
	return conn, err
}

// changed is for http.Server.ConnState.
func (c *conns) changed(conn net.Conn, now http.ConnState) {
	switch now {
	case http.StateNew, http.StateIdle:
		c.enter(conn)
	case http.StateClosed, http.StateHijacked:
		c.leave(conn)
	case http.StateActive: // when the first byte of a request was read; see handler
	}
}

func (c *conns) enter(conn net.Conn) {
	most := maxSilent
	if c.scarce.Load() {
		most = maxSilentScarce
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.silent = append(c.silent, conn)
	for len(c.silent) > most {
		_ = c.silent[0].Close()
		c.silent = slices.Delete(c.silent, 0, 1)
	}
}

func (c *conns) leave(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.silent, conn); i >= 0 {
		c.silent = slices.Delete(c.silent, i, i+1)
	}
}

type connKey struct{}

// withConn is for http.Server.ConnContext.
func withConn(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, conn)
}

// handler records that a request is under way, and calls h.
func (c *conns) handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if conn, ok := r.Context().Value(connKey{}).(net.Conn); ok {
			c.leave(conn)
		}
		h.ServeHTTP(w, r)
	})
}
