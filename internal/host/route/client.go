// SPDX-License-Identifier: Apache-2.0

package route

import (
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/fairlead/fairlead/internal/link/conns"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
)

// listener accepts the connections of clients. Beyond a limit the oldest silent one makes room,
// or the new one is reset. While too few descriptors are left new ones are reset, and most
// silent ones make room.
type listener struct {
	net.Listener
	r      *Router
	silent conns.Set
	most   int64
	open   atomic.Int64
	all    *atomic.Int64 // open ones of the listeners of its protocol
}

// listener returns ln with the limits of one listener.
func (r *Router) listener(ln net.Listener, all *atomic.Int64) *listener {
	return &listener{Listener: ln, r: r, silent: conns.Set{Silent: maxSilent, SilentScarce: maxSilentScarce}, most: maxConns, all: all}
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		tcp, ok := conn.(*net.TCPConn)
		if !ok {
			_ = conn.Close()
			return nil, fmt.Errorf("accepted a %T, want a TCP connection", conn)
		}
		switch {
		case own.Scarce(tcp, own.ForFlow):
			l.r.acceptor.Refuse(l.Listener, tcp)
			l.silent.MakeRoom()
		case !l.room():
			l.r.limited.Add(1)
			forward.Reset(tcp)
		default:
			forward.Abortive(tcp)
			l.open.Add(1)
			l.all.Add(1)
			return &accepted{TCPConn: tcp, closed: sync.OnceFunc(func() {
				l.open.Add(-1)
				l.all.Add(-1)
			})}, nil
		}
	}
}

// room reports whether one more connection may be open.
func (l *listener) room() bool {
	for l.open.Load() >= l.most {
		if !l.silent.CloseOldest() {
			return false
		}
	}
	return true
}

// accepted is the connection of a client, which counts until it is closed. It has all methods
// of a TCP connection. Closed during an answer, or by the end of this process, it is reset:
// its end would make a part of an answer look complete to HTTP/1.0.
type accepted struct {
	*net.TCPConn
	closed    func()
	answering atomic.Bool
}

// answering calls h, and marks the connection of the request meanwhile. If h panics, as
// httputil.ReverseProxy does when an answer breaks off, the connection is reset at once:
// http.Server would first wait for the rest of the request.
func answering(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, q *http.Request) {
		c := conns.Of(q.Context()).(*accepted)
		c.answering.Store(true)
		defer func() {
			if c.answering.Load() {
				_ = c.Close()
			}
		}()
		h(w, q)
		c.answering.Store(false)
	}
}

// Close implements net.Conn.
func (c *accepted) Close() error {
	defer c.closed()
	if c.answering.Load() {
		forward.Reset(c.TCPConn)
		return nil
	}
	forward.CloseOrderly(c.TCPConn)
	return nil
}
