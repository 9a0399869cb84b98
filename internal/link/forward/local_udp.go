// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	localClients = 1024 // of one socket; more are not served until one ends
	localQueue   = 64   // datagrams of one client that wait for its server
)

// Clients makes flows of the datagrams that arrive at a socket within the guest,
// one for each client.
type Clients struct {
	conn  *own.UDPConn
	from  *Receiver // of conn
	begin Begin

	mu      sync.Mutex
	closed  bool
	clients map[Client]*client
	wg      sync.WaitGroup
}

// Begin starts the flow of a new UDP client. Serve moves its datagrams, owns
// them, and returns when the flow ended; Reset of the flow makes it return.
// Without a flow the client is not served.
type Begin func(from netip.AddrPort) (serve func(Datagrams), flow *Flow)

// NewClients returns the clients of conn, which it owns from now on.
func NewClients(conn *own.UDPConn, begin Begin) *Clients {
	return &Clients{conn: conn, from: NewReceiver(conn.UDPConn), begin: begin, clients: make(map[Client]*client)}
}

// Close closes the socket and resets the flows, whose answers can no longer be sent.
func (c *Clients) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, v := range c.clients {
		v.flow.Reset(net.ErrClosed)
	}
	return c.conn.Close()
}

// Run reads datagrams until Close. All flows have ended when it returns.
func (c *Clients) Run(ctx context.Context) {
	defer c.wg.Wait()
	pause := schedule.Backoff{Min: time.Millisecond, Max: time.Second}
	for {
		frame, n, from, err := c.from.Receive()
		switch {
		case err == nil:
			pause.Reset()
			c.receive(from, frame[FrameHead:FrameHead+n])
			frame.Return()
		case errors.Is(err, net.ErrClosed):
			return
		default: // short of memory
			if schedule.Sleep(ctx, pause.Next()) != nil {
				return
			}
		}
	}
}

// receive queues a copy of a datagram for its client's flow, and drops it if the
// queue is full.
func (c *Clients) receive(from Client, b []byte) {
	v := c.client(from)
	if v == nil {
		return
	}
	select {
	case v.queue <- append([]byte{}, b...):
	default:
	}
}

// client returns a client, nil if it is not served. Only Run calls it.
func (c *Clients) client(from Client) *client {
	c.mu.Lock()
	v := c.clients[from]
	full := len(c.clients) >= localClients
	c.mu.Unlock()
	if v != nil || full {
		return v
	}
	serve, flow := c.begin(from.Addr)
	if flow == nil {
		return nil
	}
	v = &client{
		answers: NewAnswers(c.conn.UDPConn, from), flow: flow, queue: make(chan []byte, localQueue), stopped: make(chan struct{}),
	}
	c.mu.Lock()
	c.clients[from] = v
	if c.closed {
		flow.Reset(net.ErrClosed)
	}
	c.mu.Unlock()
	c.wg.Go(func() {
		serve(v)
		c.mu.Lock()
		delete(c.clients, from)
		c.mu.Unlock()
	})
	return v
}

// client is the Datagrams of one client of a Clients.
type client struct {
	answers Answers
	flow    *Flow
	queue   chan []byte
	next    []byte // taken from queue by Wait

	once    sync.Once
	stopped chan struct{}
}

// Wait implements Datagrams.
func (c *client) Wait() error {
	select {
	case c.next = <-c.queue:
		return nil
	case <-c.stopped:
		return io.EOF
	}
}

// Receive implements Datagrams.
func (c *client) Receive(b []byte) (int, error) {
	if c.next == nil {
		if err := c.Wait(); err != nil {
			return 0, err
		}
	}
	n := copy(b, c.next)
	c.next = nil
	return n, nil
}

// Send implements Datagrams. What the network does not take is lost, as UDP may.
func (c *client) Send(frame []byte) error {
	if err := c.answers.Send(frame[FrameHead:]); errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// Stop implements Datagrams.
func (c *client) Stop() { c.once.Do(func() { close(c.stopped) }) }

// Reset implements Datagrams.
func (c *client) Reset() error { return c.Close() }

// Close implements Datagrams.
func (c *client) Close() error {
	c.Stop()
	return nil
}
