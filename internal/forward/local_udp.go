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

	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	localClients = 1024 // of one socket; more are not served until one ends
	localQueue   = 64   // datagrams of one client that wait for its server
)

// PacketConn is a UDP socket (net.UDPConn, own.UDPConn).
type PacketConn interface {
	ReadFromUDPAddrPort(b []byte) (n int, from netip.AddrPort, err error)
	WriteToUDPAddrPort(b []byte, to netip.AddrPort) (n int, err error)
	Close() error
}

// Clients makes flows of the datagrams that arrive at a socket within the guest,
// one for each client address.
type Clients struct {
	conn  PacketConn
	begin Begin

	mu      sync.Mutex
	closed  bool
	clients map[netip.AddrPort]*client
	wg      sync.WaitGroup
}

// Begin starts the flow of a new UDP client. Serve moves its datagrams, owns
// them, and returns when the flow ended; Reset of the flow makes it return.
// Without a flow the client is not served.
type Begin func(from netip.AddrPort) (serve func(Datagrams), flow *Flow)

// NewClients returns the clients of conn, which it owns from now on.
func NewClients(conn PacketConn, begin Begin) *Clients {
	return &Clients{conn: conn, begin: begin, clients: make(map[netip.AddrPort]*client)}
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
	buf := make([]byte, MaxDatagram)
	pause := schedule.Backoff{Min: time.Millisecond, Max: time.Second}
	for {
		n, from, err := c.conn.ReadFromUDPAddrPort(buf)
		switch {
		case err == nil:
			pause.Reset()
			c.receive(netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), buf[:n])
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
func (c *Clients) receive(from netip.AddrPort, b []byte) {
	v := c.client(from)
	if v == nil {
		return
	}
	select {
	case v.queue <- append([]byte{}, b...):
	default:
	}
}

// client returns the client at an address, nil if it is not served. Only Run
// calls it.
func (c *Clients) client(from netip.AddrPort) *client {
	c.mu.Lock()
	v := c.clients[from]
	full := len(c.clients) >= localClients
	c.mu.Unlock()
	if v != nil || full {
		return v
	}
	serve, flow := c.begin(from)
	if flow == nil {
		return nil
	}
	v = &client{conn: c.conn, addr: from, flow: flow, queue: make(chan []byte, localQueue), stopped: make(chan struct{})}
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
	conn  PacketConn
	addr  netip.AddrPort
	flow  *Flow
	queue chan []byte
	next  []byte // taken from queue by Wait

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
	if _, err := c.conn.WriteToUDPAddrPort(frame[FrameHead:], c.addr); errors.Is(err, net.ErrClosed) {
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
