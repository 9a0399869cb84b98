// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/config/policy"
	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
)

// Options configure a Server. All are required.
type Options struct {
	Socket string        // path
	Policy policy.Policy // at first; see SetPolicy
	Limits peer.Limits   // of each container
	// Container returns the container of a process by its cgroups. It fails closed.
	Container func(cgroups []string) (port.Owner, error)
	// Carry carries a connection that was accepted to a target of the publication, and
	// owns it (forward.Server.Carry).
	Carry  func(ctx context.Context, conn net.Conn, pub port.Publication) error
	Logger *slog.Logger
}

// Server serves the socket. It is a source of the ports that containers publish.
type Server struct {
	opt     Options
	policy  atomic.Pointer[policy.Policy]
	log     *slog.Logger
	peers   *peer.Server
	network peer.Namespace // the agent's own
	flows   *own.Acceptor  // of all listeners that were passed
	feed    registry.Feed

	mu     sync.Mutex
	leases map[netip.Addr]*hostLease // by the address that stands for the container
	last   netip.Addr                // of the latest lease
}

// The connections in a second, whoever makes them, and those at once.
const (
	arrivalRate  = 1000
	arrivalBurst = 100
)

// New returns a server, which does nothing until Run.
func New(o Options) *Server {
	s := &Server{opt: o, log: o.Logger, flows: own.NewAcceptor(o.Logger, own.ForFlow), leases: make(map[netip.Addr]*hostLease), last: Targets.Addr()}
	s.peers = peer.NewServer(peer.Options{
		Socket: o.Socket, Limits: o.Limits,
		Container: func(_ context.Context, cgroups []string) (port.Owner, error) { return o.Container(cgroups) },
		Admit:     s.admit, Serve: s.serve, Arrivals: rate.NewLimiter(arrivalRate, arrivalBurst), Logger: o.Logger,
	})
	s.SetPolicy(o.Policy)
	return s
}

// SetPolicy has requests decided by p from now on. Leases that it does not allow end within
// seconds.
func (s *Server) SetPolicy(p policy.Policy) { s.policy.Store(&p) }

// Name is the source's name.
func (s *Server) Name() string { return port.SourcePublish }

// Run serves until ctx ends, with a socket that it makes when it can.
func (s *Server) Run(ctx context.Context, feed registry.Feed) (err error) {
	// Not that of the first thread, which may have entered another one.
	if s.network, err = peer.NamespaceAt(unix.AT_FDCWD, "/proc/thread-self/ns/net"); err != nil {
		return err
	}
	s.feed = feed
	feed.Replace(nil)
	made := func() {
		feed.Method(s.opt.Socket)
		feed.Replace(nil) // it is live
	}
	return s.peers.Run(ctx, made, func(err error) { feed.Stale(fmt.Errorf("publish socket: %w", err)) })
}

// admit returns why a client may ask for no port at all.
func (s *Server) admit(c peer.Client) error {
	if !s.policy.Load().Names(c.Container) {
		return peer.Refuse(peer.ReasonPolicy, "no entry of publish.allow matches %s", c)
	}
	return nil
}

// serve serves the request of one client, and the lease if it is granted.
func (s *Server) serve(ctx context.Context, c *peer.Conn) error {
	var q request
	got, err := c.Request(ctx, &q, &q.Nonce)
	if err != nil {
		return err
	}
	defer got.Close()
	if err := s.allowed(c.Client, q); err != nil {
		return err
	}
	if got.Lost {
		return peer.Refuse(peer.ReasonLimit, "%v", own.ErrDescriptors)
	}
	l := lease{s: s, Conn: c, request: q}
	if l.network, err = c.Namespace("ns/net"); err != nil {
		return err
	}
	allowed := func(now peer.Client) error { return s.allowed(now, q) }
	return c.While(ctx, allowed, func() error {
		if q.ToHost {
			return l.toHost(ctx, got)
		}
		return l.toGuest(ctx, &got)
	})
}

// allowed checks a request against the policy.
func (s *Server) allowed(c peer.Client, q request) error {
	name := strconv.Quote(c.Container.Name)
	switch {
	case q.Port == 0 || q.ToHost == (q.As == 0):
		return peer.Refuse(peer.ReasonRequest, "port %d, as %d: want ports from 1 to 65535", q.Port, q.As)
	case q.ToHost && !s.policy.Load().Host(c.Container, q.As):
		return peer.Refuse(peer.ReasonPolicy, "no entry of publish.allow gives container %s port %d of the host", name, q.As)
	case !q.ToHost && !s.policy.Load().Guest(c.Container, q.Port):
		return peer.Refuse(peer.ReasonPolicy, "no entry of publish.allow lets container %s reach port %d of the guest", name, q.Port)
	}
	return nil
}

// lease is one granted request.
type lease struct {
	s *Server
	*peer.Conn
	network peer.Namespace // the client's
	request request
}

// grant tells the client that the lease has begun.
func (l *lease) grant() error {
	if err := peer.Send(l.UnixConn, reply{Granted: true}); err != nil {
		return err
	}
	l.log("began")
	return l.SetDeadline(time.Time{})
}

func (l *lease) log(event string) {
	c := l.Container
	l.s.log.Info("publish lease", "event", event, "container", c.Name, "id", c.ID, "toHost", l.request.ToHost,
		"port", l.request.Port, "as", l.request.As, "pid", l.PID)
}

// toGuest serves a lease that leads to a port of the guest's loopback.
func (l *lease) toGuest(ctx context.Context, got *peer.Packet) error {
	fd, ok := got.Take()
	if !ok {
		return peer.Refuse(peer.ReasonDescriptor, "%d descriptors, want one listening TCP socket", len(got.FDs))
	}
	if err := l.checkSocket(fd, true); err != nil {
		peer.CloseFD(fd)
		return err
	}
	ln, err := listenerOf(fd)
	if err != nil {
		return err
	}
	defer closeListener(ln)
	if own.Scarce(ln, own.ForFlow) {
		return peer.Refuse(peer.ReasonLimit, "%v", own.ErrDescriptors)
	}
	if err := l.grant(); err != nil {
		return err
	}
	defer l.log("ended")
	ctx, cancel := context.WithCancel(ctx)
	served := make(chan struct{})
	var flows sync.WaitGroup
	flows.Go(func() { l.acceptAll(ctx, ln, served) })
	defer func() {
		cancel()
		stopAccepting(ln, served)
		flows.Wait()
	}()
	return l.waitForEnd(ctx)
}

// acceptAll carries the connections of a listener until ctx ends. It closes served when it
// accepts no more, and returns when they have ended.
func (l *lease) acceptAll(ctx context.Context, ln net.Listener, served chan<- struct{}) {
	var flows sync.WaitGroup
	number := l.request.Port
	pub := port.Publication{
		Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.AddrFrom4([4]byte{127, 0, 0, 1}), Port: number}},
		Dial: []netip.AddrPort{
			netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), number),
			netip.AddrPortFrom(netip.IPv6Loopback(), number),
		},
	}
	_ = l.s.flows.Serve(ctx, ln, func(conn net.Conn) {
		// The client can bind the listener to another address meanwhile.
		if a, ok := conn.LocalAddr().(*net.TCPAddr); !ok || !a.IP.IsLoopback() || !l.Tenant.Connect() {
			forward.Reset(conn)
			return
		}
		flows.Go(func() {
			defer l.Tenant.Disconnect()
			_ = l.s.opt.Carry(ctx, conn, pub)
		})
	})
	close(served)
	flows.Wait()
	_ = l.CloseRead() // the client may have closed its listener: the lease ends
}

// waitForEnd returns when the client has gone or ctx ends. The client has nothing to send.
func (l *lease) waitForEnd(ctx context.Context) error {
	var q request
	got, err := peer.Receive(l.UnixConn, &q)
	got.Close()
	if err == nil {
		err = peer.Refuse(peer.ReasonRequest, "unexpected message")
	}
	return inOrder(ctx, err)
}

// inOrder returns nil if a lease ended because its client has gone or the agent stops.
func inOrder(ctx context.Context, err error) error {
	if ctx.Err() == nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}
