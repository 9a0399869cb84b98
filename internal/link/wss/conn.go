// SPDX-License-Identifier: Apache-2.0

// Package wss carries links over WebSockets and TLS, for agents that nobody can dial:
// the agent dials, through a proxy if need be, and the host listens. The roles on the
// session are the same as elsewhere: the host opens flows, and the agent accepts them.
package wss

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"github.com/coder/websocket"
)

// The paths of a server.
const (
	pathBundle = "/cacerts"
	pathLink   = "/link/"
)

// protocol is the WebSocket subprotocol.
const protocol = "fairlead"

// bindingLabel is that of the TLS exporter (RFC 9266).
const bindingLabel = "EXPORTER-Channel-Binding"

// conn is a WebSocket as a byte stream. It is read and written by one goroutine each.
type conn struct {
	ws      *websocket.Conn
	cork    *cork
	message io.Reader // the message that is being read, nil between two
	peer    net.Addr
	proof   string
	binding []byte
}

// newConn wraps ws, whose connection is below k. Proof says how the peer proved itself by
// TLS, empty if it did not.
func newConn(ws *websocket.Conn, k *cork, peer net.Addr, state *tls.ConnectionState, proof string) (*conn, error) {
	if state == nil || k == nil {
		return nil, errInternal
	}
	binding, err := state.ExportKeyingMaterial(bindingLabel, nil, 32)
	if err != nil {
		return nil, err
	}
	ws.SetReadLimit(-1) // of a message, which is not kept as a whole
	return &conn{ws: ws, cork: k, peer: peer, proof: proof, binding: binding}, nil
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	for {
		if c.message == nil {
			kind, message, err := c.ws.Reader(context.Background())
			switch {
			case websocket.CloseStatus(err) != -1:
				return 0, io.EOF
			case err != nil:
				return 0, err
			case kind != websocket.MessageBinary:
				return 0, errText
			}
			c.message = message
		}
		n, err := c.message.Read(p)
		if err == io.EOF { // of the message
			c.message, err = nil, nil
		}
		if n > 0 || err != nil || len(p) == 0 {
			return n, err
		}
	}
}

var errText = errors.New("the peer sent a text message")

// Write implements net.Conn. It sends p as one message.
func (c *conn) Write(p []byte) (int, error) {
	held := len(p) > corkMin
	if held {
		c.cork.hold()
	}
	err := c.ws.Write(context.Background(), websocket.MessageBinary, p)
	if held {
		err = errors.Join(err, c.cork.release())
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close closes at once, without the WebSocket's own farewell: the session has one.
func (c *conn) Close() error { return c.ws.CloseNow() }

// closeNow closes a connection without TLS's own farewell, for which tls.Conn waits while
// another goroutine writes: for ever, if the peer reads no answers to its key updates.
func closeNow(c net.Conn) error { return netConn(c).Close() }

// netConn is the connection below that of TLS.
func netConn(c net.Conn) net.Conn {
	if t, ok := c.(*tls.Conn); ok {
		return t.NetConn()
	}
	return c
}

// LocalAddr is not known behind a proxy.
func (c *conn) LocalAddr() net.Addr { return address("") }

// RemoteAddr is the peer's address, or the server's name.
func (c *conn) RemoteAddr() net.Addr { return c.peer }

// SetDeadline is SetWriteDeadline.
func (c *conn) SetDeadline(t time.Time) error { return c.SetWriteDeadline(t) }

// SetReadDeadline is not supported: a session's keep-alive finds silent peers.
func (c *conn) SetReadDeadline(t time.Time) error {
	if t.IsZero() {
		return nil
	}
	return os.ErrNoDeadline
}

// SetWriteDeadline sets when a write that is under way closes the connection.
func (c *conn) SetWriteDeadline(t time.Time) error {
	c.cork.setDeadline(t)
	return nil
}

// Proof implements link.Secured.
func (c *conn) Proof() string { return c.proof }

// Binding implements link.Secured.
func (c *conn) Binding() []byte { return c.binding }

// address is a server's host and port.
type address string

func (a address) Network() string { return "wss" }
func (a address) String() string  { return string(a) }
