// SPDX-License-Identifier: Apache-2.0

package host

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	clientQueue = 128     // queued datagrams of one client
	portQueue   = 4 << 20 // queued bytes of all clients of one port
)

var (
	errIdle    = errors.New("idle")
	errEvicted = errors.New("too many clients")
	errMoved   = errors.New("the port serves another publication now")
	errStuck   = errors.New("too much is queued for the link")
)

// udpPort is one UDP listener. Each client is one flow.
type udpPort struct {
	d    *door
	pc   *own.UDPConn
	from *forward.Receiver // of pc

	mu      sync.Mutex
	closed  bool
	clients map[forward.Client]*udpClient
	recent  list.List // of *udpClient, the most recently used in front
	queued  int       // bytes in all queues
}

type udpClient struct {
	to      *target
	client  forward.Client
	answers forward.Answers
	at      *list.Element
	flow    *forward.Flow
	trace   *trace.Flow // nil if it is not traced
	idle    *forward.Idle

	// Datagrams that the link does not take at once are queued.
	stream  atomic.Pointer[link.Datagrams] // nil before it is open
	queue   chan queued
	waiting atomic.Int32 // in queue, or taken from there and not sent yet
}

// queued is a datagram of size bytes in its frame; if begun, the unsent part of it.
type queued struct {
	frame []byte
	begun bool
	size  int
}

func newUDPPort(d *door, pc *own.UDPConn) *udpPort {
	return &udpPort{d: d, pc: pc, from: forward.NewReceiver(pc.UDPConn), clients: make(map[forward.Client]*udpClient)}
}

// Close stops listening and ends the flows of all clients.
func (p *udpPort) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, c := range p.clients {
		p.drop(c, net.ErrClosed)
	}
	return p.pc.Close()
}

// retarget ends the flows that lead elsewhere than to a target.
func (p *udpPort) retarget(to *target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, v := range p.clients {
		if v.to.guest != to.guest || v.to.key != to.key {
			p.drop(v, errMoved)
		}
	}
}

// drop ends a client's flow. p.mu is held.
func (p *udpPort) drop(c *udpClient, cause error) {
	if p.clients[c.client] == c {
		delete(p.clients, c.client)
		p.recent.Remove(c.at)
	}
	c.flow.Reset(cause)
}

// run serves datagrams until the listener is closed.
func (p *udpPort) run(ctx context.Context) {
	pause := schedule.Backoff{Min: time.Millisecond, Max: receivePause}
	for {
		err := p.receive(ctx)
		switch {
		case err == nil:
			pause.Reset()
		case errors.Is(err, net.ErrClosed):
			return
		default:
			// Some systems report here that a client is gone, which the next call does
			// not; or memory is short. The socket remains usable.
			first := !pause.Failing()
			if d := pause.Next(); !first && schedule.Sleep(ctx, d) != nil {
				return
			}
		}
	}
}

// receive serves one datagram.
func (p *udpPort) receive(ctx context.Context) error {
	frame, n, from, err := p.from.Receive()
	if err != nil {
		return err
	}
	defer frame.Return()
	c := p.client(ctx, from)
	if c == nil {
		return nil
	}
	rest, begun := c.try(frame[:forward.FrameHead+n])
	if len(rest) > 0 {
		p.queue(c, queued{rest, begun, n})
		return nil
	}
	p.d.h.meter.AToB.Add(uint64(n))
	c.trace.Moved(trace.ToGuest, n, frame[forward.FrameHead:forward.FrameHead+n])
	return nil
}

// client returns what is held of a client, nil if it is not served.
func (p *udpPort) client(ctx context.Context, from forward.Client) *udpClient {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	c := p.clients[from]
	if c == nil {
		if c = p.enter(ctx, from); c == nil {
			return nil
		}
	}
	p.recent.MoveToFront(c.at)
	c.idle.Touch()
	return c
}

// try sends a frame if the queue is empty and the link takes it at once, so that
// most datagrams wake no other goroutine. It returns what is left to send.
func (c *udpClient) try(frame []byte) (rest []byte, begun bool) {
	s := c.stream.Load()
	if s == nil || c.waiting.Load() > 0 {
		return frame, false
	}
	return s.TrySend(frame)
}

// queue puts a copy of a datagram into its client's queue, or drops it if the queue
// is full.
func (p *udpPort) queue(c *udpClient, q queued) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.clients[c.client] != c {
		return // its flow ended meanwhile
	}
	if p.queued+len(q.frame) > portQueue || len(c.queue) == cap(c.queue) {
		p.d.h.stats.dropped.Add(1)
		if q.begun { // the stream cannot go on after half a frame
			p.drop(c, errStuck)
		}
		return
	}
	p.queued += len(q.frame)
	c.waiting.Add(1)
	q.frame = append([]byte(nil), q.frame...)
	c.queue <- q // there is room, because nothing else sends
}

// enter begins the flow of a new client. p.mu is held.
func (p *udpPort) enter(ctx context.Context, from forward.Client) *udpClient {
	h, to := p.d.h, p.d.to.Load()
	if len(p.clients) >= h.opt.MaxUDPClients {
		h.stats.evicted.Add(1)
		p.drop(p.recent.Back().Value.(*udpClient), errEvicted)
	}
	ctx, f := to.guest.flows.Begin(ctx, to.key)
	if f == nil {
		h.stats.overLimit.Add(1)
		return nil
	}
	c := &udpClient{
		to: to, client: from, answers: forward.NewAnswers(p.pc.UDPConn, from), queue: make(chan queued, clientQueue),
		flow: f, trace: h.trace(to, from.Addr),
	}
	c.idle = forward.NewIdle(h.opt.UDPIdle, func() { f.Reset(errIdle) })
	c.at = p.recent.PushFront(c)
	p.clients[from] = c
	h.stats.udp.Add(1)
	h.wg.Go(func() {
		defer h.stats.udp.Add(-1)
		defer f.End()
		err := p.carry(ctx, c)
		c.idle.Stop()
		p.leave(c)
		c.trace.End(err)
		if !errors.Is(err, errIdle) && !errors.Is(err, net.ErrClosed) {
			to.guest.log.Debug("flow ended", "publication", to.key, "peer", from.Addr, "err", err)
		}
	})
	return c
}

// leave releases what a client held whose flow has ended.
func (p *udpPort) leave(c *udpClient) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop(c, nil)
	for {
		select {
		case q := <-c.queue:
			p.queued -= len(q.frame)
		default:
			return
		}
	}
}

// carry moves a client's datagrams both ways until its flow ends, and returns why.
func (p *udpPort) carry(ctx context.Context, c *udpClient) error {
	s, err := p.d.h.stream(ctx, c.to, c.client.Addr, netip.AddrPort{})
	if err != nil {
		return err
	}
	stream := link.NewDatagrams(s)
	c.stream.Store(stream)
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		if errors.Is(context.Cause(ctx), errIdle) {
			stream.Stop() // both directions return
		} else {
			_ = stream.Reset()
		}
	})
	var wg sync.WaitGroup
	wg.Go(func() { c.flow.Reset(p.toClient(c, stream)) })
	c.flow.Reset(p.toGuest(ctx, c, stream))
	wg.Wait()
	if !stop() {
		<-stopped
	}
	_ = stream.Close()
	return context.Cause(ctx)
}

func (p *udpPort) toGuest(ctx context.Context, c *udpClient, stream *link.Datagrams) error {
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case q := <-c.queue:
			err := q.send(stream)
			c.waiting.Add(-1)
			p.mu.Lock()
			p.queued -= len(q.frame)
			p.mu.Unlock()
			if err != nil {
				return err
			}
			p.d.h.meter.AToB.Add(uint64(q.size))
			c.trace.Moved(trace.ToGuest, q.size, q.payload())
		}
	}
}

// payload returns the datagram, nil if a part of it was sent before.
func (q queued) payload() []byte {
	if q.begun {
		return nil
	}
	return q.frame[forward.FrameHead:]
}

func (q queued) send(stream *link.Datagrams) error {
	if q.begun {
		return stream.Finish(q.frame)
	}
	return stream.Send(q.frame)
}

func (p *udpPort) toClient(c *udpClient, stream *link.Datagrams) error {
	for {
		if err := stream.Wait(); err != nil { // the frame is borrowed only when needed
			return fmt.Errorf("link: %w", err)
		}
		if err := p.reply(c, stream); err != nil {
			return err
		}
	}
}

// reply sends one datagram of the guest to the client.
func (p *udpPort) reply(c *udpClient, stream *link.Datagrams) error {
	frame := forward.BorrowFrame()
	defer frame.Return()
	n, err := stream.Receive(frame[:])
	if err != nil {
		return fmt.Errorf("link: %w", err)
	}
	c.idle.Touch()
	p.d.h.meter.BToA.Add(uint64(n))
	c.trace.Moved(trace.ToHost, n, frame[:n])
	if err := c.answers.Send(frame[:n]); errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil // datagrams may be lost
}
