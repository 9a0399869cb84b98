// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/wire"
)

const (
	localClients = 1024 // of one socket; more are not served until one ends
	localQueue   = 64   // datagrams of one client that wait for the guest
)

// PacketConn is a UDP socket (net.UDPConn, own.UDPConn).
type PacketConn interface {
	ReadFromUDPAddrPort(b []byte) (n int, from netip.AddrPort, err error)
	WriteToUDPAddrPort(b []byte, to netip.AddrPort) (n int, err error)
	Close() error
}

// Clients makes flows of the datagrams that come in at a socket within the guest:
// each client's address is one, and speaks with a Server as a host's does.
type Clients struct {
	conn  PacketConn
	begin func(from netip.AddrPort) (carry func(link.Stream), cut func(), ok bool)

	mu      sync.Mutex
	closed  bool
	clients map[netip.AddrPort]*client
	wg      sync.WaitGroup
}

type client struct {
	queue chan []byte // framed datagrams
	cut   func()
}

// NewClients returns the clients of conn, which it owns from now on. Begin is
// asked about each new one: carry takes its stream to a Server, owns it and
// returns when the flow ended; cut makes it return.
func NewClients(conn PacketConn, begin func(from netip.AddrPort) (carry func(link.Stream), cut func(), ok bool)) *Clients {
	return &Clients{conn: conn, begin: begin, clients: make(map[netip.AddrPort]*client)}
}

// Close gives the address back and ends the flows: there is no way back for
// their answers.
func (c *Clients) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, v := range c.clients {
		v.cut()
	}
	return c.conn.Close()
}

// Run hands out datagrams until Close. All flows have ended when it returns.
func (c *Clients) Run(ctx context.Context) {
	defer c.wg.Wait()
	buf := make([]byte, wire.DatagramHeader+wire.MaxDatagram)
	for {
		n, from, err := c.conn.ReadFromUDPAddrPort(buf[wire.DatagramHeader:])
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // want of memory; the socket itself stays good
			select {
			case <-ctx.Done():
				return
			case <-time.After(10 * time.Millisecond):
			}
			continue
		}
		c.queue(ctx, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), buf[:wire.DatagramHeader+n])
	}
}

// queue hands a copy of a datagram to its client's flow; what has no room is
// lost, as datagrams are.
func (c *Clients) queue(ctx context.Context, from netip.AddrPort, frame []byte) {
	c.mu.Lock()
	v := c.clients[from]
	full := len(c.clients) >= localClients
	c.mu.Unlock()
	if v == nil {
		if full {
			return
		}
		carry, cut, ok := c.begin(from)
		if !ok {
			return
		}
		v = &client{make(chan []byte, localQueue), cut}
		c.mu.Lock()
		c.clients[from] = v
		if c.closed {
			cut()
		}
		c.mu.Unlock()
		c.wg.Go(func() {
			c.carry(ctx, from, v, carry)
			c.mu.Lock()
			delete(c.clients, from)
			c.mu.Unlock()
		})
	}
	select {
	case v.queue <- append([]byte(nil), frame...):
	default:
	}
}

// carry moves a client's datagrams both ways until the flow ends.
func (c *Clients) carry(ctx context.Context, from netip.AddrPort, v *client, serve func(link.Stream)) {
	near, far := net.Pipe()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { c.answers(near, from) })
	wg.Go(func() {
		defer near.Close()
		for {
			select {
			case <-ctx.Done():
				return
			case frame := <-v.queue:
				if wire.WriteDatagram(near, frame) != nil {
					return
				}
			}
		}
	})
	serve(pipe{far})
	cancel()
	wg.Wait()
}

// answers sends the client what comes back.
func (c *Clients) answers(near net.Conn, to netip.AddrPort) {
	defer near.Close()
	r := bufio.NewReader(near)
	if reply, err := wire.ReadReply(r); err != nil || reply.Status != wire.FlowOK {
		return
	}
	buf := make([]byte, wire.MaxDatagram)
	for {
		n, err := wire.ReadDatagram(r, buf)
		if err != nil {
			return
		}
		if _, err := c.conn.WriteToUDPAddrPort(buf[:n], to); errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

// pipe is a stream within the process.
type pipe struct{ net.Conn }

// CloseWrite implements link.Stream.
func (p pipe) CloseWrite() error { return p.Close() }

// Reset implements link.Stream.
func (p pipe) Reset() error { return p.Close() }
