// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
)

// Targets has the addresses that stand for containers which publish a port. They are of
// the loopback, so they are never wider than it, and lead nowhere in the guest. A
// publication at one of them never wins a host port against a server of the guest at
// 127.0.0.1 or at all addresses. Of two of them the lower address wins. Servers of the guest
// at them are not dialled.
var Targets = netip.MustParsePrefix("127.102.0.0/16")

// maxPending bounds the connections that one client was asked for and has not answered.
const maxPending = 64

// hostLease is a lease for a container's own port.
type hostLease struct {
	*lease
	target netip.AddrPort

	write sync.Mutex // held while a message is sent

	mu      sync.Mutex
	ended   bool
	last    uint64 // number of the latest question
	pending map[uint64]*question
	open    map[*passed]struct{}
}

// question asks the client for a connection, which counts from here on until it is closed
// or fails.
type question struct {
	answer    chan answer // has room for the one
	abandoned bool        // nobody waits any more
}

// answer is what became of a question.
type answer struct {
	conn net.Conn
	err  error
}

var errEnded = fmt.Errorf("the container's lease has ended: %w", syscall.ECONNREFUSED)

// toHost serves a lease that makes a publication of a port of the container.
func (l *lease) toHost(ctx context.Context, got peer.Packet) error {
	if len(got.FDs) > 0 {
		return peer.Refuse(peer.ReasonDescriptor, "%d descriptors, want none", len(got.FDs))
	}
	if l.network == l.s.network {
		return peer.Refuse(peer.ReasonNamespace, "the container has the guest's own network: its ports are published without help")
	}
	h := &hostLease{lease: l, pending: make(map[uint64]*question), open: make(map[*passed]struct{})}
	if err := l.s.enter(h); err != nil {
		return err
	}
	defer l.s.leave(h)
	b := h.binding()
	l.s.feed.Apply(port.Change{Put: []port.Binding{b}})
	defer l.s.feed.Apply(port.Change{Drop: []port.Origin{b.Origin}})
	if err := h.grant(); err != nil {
		return err
	}
	defer l.log("ended")
	for {
		if err := h.receive(); err != nil {
			return inOrder(ctx, err)
		}
	}
}

// enter gives the lease an address: the one that was given back last is used last, and none
// comes before that of a lease for the same host port, which would lose it.
func (s *Server) enter(h *hostLease) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	after := s.lastFor(h.request.As)
	for range 1 << 16 {
		if s.last = s.last.Next(); !Targets.Contains(s.last) {
			s.last = Targets.Addr().Next()
		}
		if _, taken := s.leases[s.last]; !taken && after.Less(s.last) {
			h.target = netip.AddrPortFrom(s.last, h.request.As)
			s.leases[s.last] = h
			return nil
		}
	}
	return peer.Refuse(peer.ReasonLimit, "port %d of the host has been asked for too often: try again later", h.request.As)
}

// lastFor returns the last address of the leases for a host port. s.mu is held.
func (s *Server) lastFor(number uint16) netip.Addr {
	last := Targets.Addr()
	for a, h := range s.leases {
		if h.target.Port() == number && last.Less(a) {
			last = a
		}
	}
	return last
}

// leave ends the lease and resets its connections.
func (s *Server) leave(h *hostLease) {
	s.mu.Lock()
	delete(s.leases, h.target.Addr())
	s.mu.Unlock()
	h.mu.Lock()
	h.ended = true
	for id := range h.pending {
		h.fail(id, errEnded)
	}
	open := slices.Collect(maps.Keys(h.open))
	h.mu.Unlock()
	for _, c := range open {
		forward.Reset(c)
	}
}

func (h *hostLease) binding() port.Binding {
	detail := "port " + strconv.Itoa(int(h.request.Port)) + " of the container, asked for by pid " + strconv.Itoa(int(h.PID))
	return port.Binding{
		Key:    port.Key{Protocol: port.TCP, Address: h.target.Addr(), Port: h.target.Port()},
		Origin: port.Origin{Source: port.SourcePublish, ID: h.target.Addr().String()},
		Dial:   []netip.AddrPort{h.target},
		Owner:  h.Container,
		Detail: port.NewDetail(detail),
	}
}

// Dial connects to a target in the guest: to a container that published a port, else by
// the network.
func (s *Server) Dial(ctx context.Context, network string, target netip.AddrPort) (net.Conn, error) {
	if !Targets.Contains(target.Addr()) {
		return forward.DialGuest(ctx, network, target)
	}
	s.mu.Lock()
	h := s.leases[target.Addr()]
	s.mu.Unlock()
	if network != "tcp" || h == nil || h.target != target {
		return nil, fmt.Errorf("dial %s: %w", target, errEnded)
	}
	conn, err := h.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("dial port %d of container %q: %w", h.request.Port, h.Container.Name, err)
	}
	return conn, nil
}

// dial asks the client for a connection to the container's port.
func (h *hostLease) dial(ctx context.Context) (net.Conn, error) {
	id, q, err := h.ask()
	if err != nil {
		return nil, err
	}
	if err := h.send(id); err != nil {
		_ = h.CloseRead() // ends the lease
	}
	select {
	case a := <-q.answer:
		return a.conn, a.err
	case <-ctx.Done():
		h.abandon(id, q)
		return nil, context.Cause(ctx)
	}
}

// ask enters a question.
func (h *hostLease) ask() (id uint64, q *question, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.ended:
		return 0, nil, errEnded
	case len(h.pending) >= maxPending:
		return 0, nil, errors.New("its client does not answer")
	case !h.Tenant.Connect():
		return 0, nil, errors.New("the container has too many connections")
	}
	h.last++
	q = &question{answer: make(chan answer, 1)}
	h.pending[h.last] = q
	return h.last, q, nil
}

func (h *hostLease) send(id uint64) error {
	h.write.Lock()
	defer h.write.Unlock()
	_ = h.SetWriteDeadline(time.Now().Add(peer.RequestTimeout))
	return peer.Send(h.UnixConn, reply{Connect: id})
}

// abandon gives up a question. The client may still answer it, or just have done so.
func (h *hostLease) abandon(id uint64, q *question) {
	h.mu.Lock()
	q.abandoned = h.pending[id] == q
	h.mu.Unlock()
	if q.abandoned {
		return
	}
	if a := <-q.answer; a.conn != nil {
		forward.Reset(a.conn)
	}
}

// fail answers a question without a connection. h.mu is held.
func (h *hostLease) fail(id uint64, err error) {
	h.pending[id].answer <- answer{err: err}
	delete(h.pending, id)
	h.Tenant.Disconnect()
}

// receive takes one answer of the client. Its error ends the lease.
func (h *hostLease) receive() error {
	var q request
	got, err := peer.Receive(h.UnixConn, &q)
	if err != nil {
		return err
	}
	defer got.Close()
	if err := h.Sent(got.Sender); err != nil {
		return err
	}
	fd, has := got.Take()
	h.mu.Lock()
	_, asked := h.pending[q.Connect]
	if asked && !has {
		err := q.failure()
		if got.Lost {
			err = own.ErrDescriptors
		}
		h.fail(q.Connect, err)
		h.mu.Unlock()
		return nil
	}
	h.mu.Unlock()
	if !asked {
		if has {
			peer.CloseFD(fd)
		}
		return peer.Refuse(peer.ReasonRequest, "answer %d to no question", q.Connect)
	}
	return h.deliver(q.Connect, fd)
}

// failure is why the client has no connection.
func (q request) failure() error {
	if q.Refused {
		return syscall.ECONNREFUSED
	}
	return fmt.Errorf("its client failed: %q", q.Failed)
}

// deliver gives a connection, which it owns as a descriptor, to who asked for it. Only one
// goroutine delivers, so the question is pending, unless the lease has ended.
func (h *hostLease) deliver(id uint64, fd int) error {
	if err := h.checkSocket(fd, false); err != nil {
		peer.CloseFD(fd)
		return err
	}
	c, err := newPassed(fd)
	if err != nil {
		return err
	}
	c.release = sync.OnceFunc(func() { h.closed(c) })
	h.mu.Lock()
	q := h.pending[id]
	delete(h.pending, id)
	h.open[c] = struct{}{}
	abandoned := q.abandoned
	q.answer <- answer{conn: c}
	h.mu.Unlock()
	if abandoned {
		forward.Reset(c)
	}
	return nil
}

// closed counts a connection out.
func (h *hostLease) closed(c *passed) {
	h.mu.Lock()
	delete(h.open, c)
	h.mu.Unlock()
	h.Tenant.Disconnect()
}
