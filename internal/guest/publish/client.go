// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/link/forward"
)

// Request is what a client wants.
type Request struct {
	// ToHost publishes Port of the container at port As of the host. Otherwise port As of
	// the container's loopback leads to Port of the guest's.
	ToHost   bool
	Port, As uint16
}

// dialTimeout bounds the client's connection to the container's own port. The agent waits
// for 5 s.
const dialTimeout = 4 * time.Second

// Hold asks the agent at socket for a lease, calls granted when it has begun, and keeps
// it until ctx ends. It then returns nil; an error is why there is no lease, or why it
// ended, a *peer.Refusal if the agent says so.
func Hold(ctx context.Context, socket string, r Request, granted func()) error {
	conn, err := peer.Connect(ctx, socket)
	if err != nil {
		return err
	}
	c := &client{conn: conn}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	err = c.hold(ctx, r, granted)
	switch {
	case ctx.Err() != nil:
		return nil
	case errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET):
		return errors.New("the agent has gone: is it running?")
	}
	return err
}

// client is the container's end of a connection.
type client struct {
	conn    *net.UnixConn
	write   sync.Mutex // held while a message is sent
	request Request
}

func (c *client) hold(ctx context.Context, r Request, granted func()) error {
	c.request = r
	first, err := c.receive()
	if err != nil {
		return err
	}
	if first.Version != peer.Version {
		return fmt.Errorf("the agent speaks version %d, this program version %d: use the same fairlead", first.Version, peer.Version)
	}
	if err := c.ask(ctx, first.Nonce); err != nil {
		return err
	}
	// Not more than the agent asks for at the same time.
	dials := make(chan struct{}, maxPending)
	var all sync.WaitGroup
	defer all.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for {
		m, err := c.receive()
		switch {
		case err != nil:
			return err
		case m.Granted:
			granted()
		case m.Connect != 0:
			dials <- struct{}{}
			all.Go(func() {
				defer func() { <-dials }()
				c.answer(ctx, m.Connect)
			})
		}
	}
}

// receive reads one message; that of a refusal is an error.
func (c *client) receive() (reply, error) {
	var m reply
	got, err := peer.Receive(c.conn, &m)
	got.Close()
	if err == nil && m.Error != nil {
		err = m.Error
	}
	return m, err
}

// ask sends the request, and the listener with it if one is needed.
func (c *client) ask(ctx context.Context, nonce string) error {
	q := request{Nonce: nonce, Port: c.request.Port}
	if c.request.ToHost {
		q.ToHost, q.As = true, c.request.As
		return c.send(q, nil)
	}
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(ctx, "tcp4", "127.0.0.1:"+strconv.Itoa(int(c.request.As)))
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	return c.send(q, l.(*net.TCPListener))
}

// send sends a message with a socket, which may be nil.
func (c *client) send(q request, socket syscall.Conn) error {
	c.write.Lock()
	defer c.write.Unlock()
	if socket == nil {
		return peer.Send(c.conn, q)
	}
	return peer.Control(socket, func(fd int) error { return peer.Send(c.conn, q, fd) })
}

// answer connects to the container's port and passes the connection.
func (c *client) answer(ctx context.Context, id uint64) {
	q := request{Connect: id}
	conn, err := c.dial(ctx)
	if err != nil {
		q.Failed, q.Refused = truncate(err.Error()), errors.Is(err, syscall.ECONNREFUSED)
		_ = c.send(q, nil)
		return
	}
	defer func() { _ = conn.Close() }()
	_ = c.send(q, conn.(*net.TCPConn))
}

// dial connects to the container's port, by IPv4 or else IPv6.
func (c *client) dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	// When this program is killed before the agent has the connection, that is no orderly end.
	d := net.Dialer{Control: forward.AbortiveDial}
	d.SetMultipathTCP(false)
	number := strconv.Itoa(int(c.request.Port))
	conn, err := d.DialContext(ctx, "tcp4", "127.0.0.1:"+number)
	if err == nil {
		return conn, nil
	}
	if conn, err6 := d.DialContext(ctx, "tcp6", "[::1]:"+number); err6 == nil {
		return conn, nil
	}
	return nil, err
}

// truncate bounds a text for a message.
func truncate(s string) string { return s[:min(len(s), 256)] }
