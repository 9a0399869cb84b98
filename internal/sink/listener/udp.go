// SPDX-License-Identifier: Apache-2.0

package listener

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
)

const (
	udpClients = 1024 // of one placeholder; more are not served until one ends
	udpQueue   = 64   // datagrams of one client that wait for the guest
)

// udpHold is a UDP placeholder. Each client address is one flow, which speaks
// with the forwarder as a host's does.
type udpHold struct {
	s  *Sink
	h  *hold
	pc *own.UDPConn

	mu      sync.Mutex
	closed  bool
	clients map[netip.AddrPort]chan []byte // framed datagrams
	cuts    map[netip.AddrPort]func()
}

func newUDPHold(s *Sink, h *hold, pc *own.UDPConn) *udpHold {
	return &udpHold{s: s, h: h, pc: pc, clients: make(map[netip.AddrPort]chan []byte), cuts: make(map[netip.AddrPort]func())}
}

// Close gives the address back and ends the flows: there is no way back for
// their answers.
func (u *udpHold) Close() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closed = true
	for _, cut := range u.cuts {
		cut()
	}
	return u.pc.Close()
}

func (u *udpHold) run(ctx context.Context) {
	buf := make([]byte, wire.DatagramHeader+wire.MaxDatagram)
	for {
		n, from, err := u.pc.ReadFromUDPAddrPort(buf[wire.DatagramHeader:])
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
		u.queue(ctx, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), buf[:wire.DatagramHeader+n])
	}
}

// queue hands a copy of a datagram to its client's flow; what has no room is
// lost, as datagrams are.
func (u *udpHold) queue(ctx context.Context, from netip.AddrPort, frame []byte) {
	u.mu.Lock()
	q := u.clients[from]
	full := len(u.clients) >= udpClients
	u.mu.Unlock()
	if q == nil {
		if full {
			return
		}
		p, f, ok := u.s.begin(ctx, u.h)
		if !ok {
			return
		}
		q = make(chan []byte, udpQueue)
		u.mu.Lock()
		u.clients[from], u.cuts[from] = q, func() { f.cut(net.ErrClosed) }
		if u.closed {
			f.cut(net.ErrClosed)
		}
		u.mu.Unlock()
		u.s.wg.Go(func() {
			err := u.carry(f.ctx, p, from, q)
			u.mu.Lock()
			delete(u.clients, from)
			delete(u.cuts, from)
			u.mu.Unlock()
			u.s.finish(f, err)
		})
	}
	select {
	case q <- append([]byte(nil), frame...):
	default:
	}
}

// carry moves a client's datagrams both ways until the flow ends.
func (u *udpHold) carry(ctx context.Context, p port.Publication, from netip.AddrPort, q <-chan []byte) error {
	near, far := net.Pipe()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { u.answers(near, from) })
	wg.Go(func() {
		defer near.Close()
		for {
			select {
			case <-ctx.Done():
				return
			case frame := <-q:
				if wire.WriteDatagram(near, frame) != nil {
					return
				}
			}
		}
	})
	err := u.s.o.ServeUDP(ctx, pipe{far}, p, wire.FlowRequest{Key: p.Key, Peer: from})
	cancel()
	wg.Wait()
	return err
}

// answers sends the client what comes back.
func (u *udpHold) answers(near net.Conn, to netip.AddrPort) {
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
		if _, err := u.pc.WriteToUDPAddrPort(buf[:n], to); errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

// pipe is a stream within the process (link.Stream).
type pipe struct{ net.Conn }

func (p pipe) CloseWrite() error { return p.Close() }
func (p pipe) Reset() error      { return p.Close() }
