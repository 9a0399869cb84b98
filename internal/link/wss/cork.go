// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// corkMax takes one frame of the link with the WebSocket's header.
	corkMax = 68 << 10
	// corkMin is what the WebSocket library writes at once anyway.
	corkMin = 4000
)

var corkBuffers = sync.Pool{New: func() any { return new([corkMax]byte) }}

// cork collects what the WebSocket library writes in pieces of 4 KiB, each of which
// would be a TLS record and a system call.
type cork struct {
	io.ReadWriteCloser

	mu   sync.Mutex     // held while bytes are sent
	held *[corkMax]byte // nil if writes are passed on
	n    int            // bytes in held

	timing   sync.Mutex
	deadline time.Time   // of writes; zero is none
	sending  bool        // a write is under way
	late     *time.Timer // closes the connection while sending; nil without deadline
}

// Write implements io.Writer.
func (c *cork) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held == nil {
		return len(p), c.send(p)
	}
	if c.n+len(p) > corkMax {
		if err := c.flush(); err != nil {
			return 0, err
		}
		if len(p) > corkMax {
			return len(p), c.send(p)
		}
	}
	c.n += copy(c.held[c.n:], p)
	return len(p), nil
}

// hold makes writes wait for release.
func (c *cork) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = corkBuffers.Get().(*[corkMax]byte)
}

// release sends what was held.
func (c *cork) release() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.flush()
	corkBuffers.Put(c.held)
	c.held = nil
	return err
}

// flush sends what is held. c.mu is held.
func (c *cork) flush() error {
	p := c.held[:c.n]
	c.n = 0
	return c.send(p)
}

// send writes p, and closes the connection if that takes too long. c.mu is held.
func (c *cork) send(p []byte) error {
	c.timed(true)
	_, err := c.ReadWriteCloser.Write(p)
	c.timed(false)
	return err
}

// timed begins or ends the time that a write may take.
func (c *cork) timed(sending bool) {
	c.timing.Lock()
	defer c.timing.Unlock()
	c.sending = sending
	c.setTimer()
}

// setDeadline sets that of writes, also of the one under way.
func (c *cork) setDeadline(t time.Time) {
	c.timing.Lock()
	defer c.timing.Unlock()
	c.deadline = t
	c.setTimer()
}

// setTimer plans the end of a write. c.timing is held.
func (c *cork) setTimer() {
	if c.late != nil {
		c.late.Stop()
		c.late = nil
	}
	if c.sending && !c.deadline.IsZero() {
		c.late = time.AfterFunc(time.Until(c.deadline), func() { _ = c.Close() })
	}
}

// corkTransport corks the connections of answers that switch protocols.
type corkTransport struct {
	*http.Transport
	cork *cork // of the last such answer

	mu    sync.Mutex
	ended bool
	conns []net.Conn // that were made, below TLS
}

// dialer returns dial with connections that closeConns closes.
func (t *corkTransport) dialer(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.ended {
			return nil, errors.Join(net.ErrClosed, c.Close())
		}
		t.conns = append(t.conns, c)
		return c, nil
	}
}

// closeConns closes all connections, and those that come, without TLS's own farewell; see
// closeNow.
func (t *corkTransport) closeConns() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended = true
	for _, c := range t.conns {
		_ = c.Close()
	}
}

// abruptBody is an answer's body that is closed by closeConns.
type abruptBody struct {
	io.ReadWriteCloser
	t *corkTransport
}

// Close implements io.Closer.
func (b abruptBody) Close() error {
	b.t.closeConns()
	return b.ReadWriteCloser.Close()
}

// RoundTrip implements http.RoundTripper.
func (t *corkTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := t.Transport.RoundTrip(r)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		return resp, err
	}
	if rwc, ok := resp.Body.(io.ReadWriteCloser); ok {
		t.cork = &cork{ReadWriteCloser: abruptBody{rwc, t}}
		resp.Body = t.cork
	}
	return resp, nil
}

// corkResponse corks a connection that is hijacked.
type corkResponse struct {
	http.ResponseWriter
	hijacked bool
	cork     *cork // after Hijack without error
}

// Hijack implements http.Hijacker.
func (w *corkResponse) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, rw, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	w.hijacked = true
	c = abruptConn{c}
	if err := rw.Flush(); err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	w.cork = &cork{ReadWriteCloser: c}
	rw.Writer.Reset(w.cork)
	return corkedConn{c, w.cork}, rw, nil
}

// abruptConn is a connection that is closed by closeNow.
type abruptConn struct{ net.Conn }

// Close implements net.Conn.
func (c abruptConn) Close() error { return closeNow(c.Conn) }

// corkedConn is a connection whose writes may be held.
type corkedConn struct {
	net.Conn
	cork *cork
}

// Write implements net.Conn.
func (c corkedConn) Write(p []byte) (int, error) { return c.cork.Write(p) }
