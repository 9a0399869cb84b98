// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"cmp"
	"context"
	"encoding/json"
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

	"github.com/fairlead/fairlead/internal/cgroup"
	"github.com/fairlead/fairlead/internal/forward"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/publish/ask"
	"github.com/fairlead/fairlead/internal/publish/policy"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	// requestTimeout bounds the time between a connection and its request, and a write.
	requestTimeout = 5 * time.Second
	// maxClients bounds the connections of all containers together, and maxRefusals those
	// that are refused because there are so many.
	maxClients  = 1024
	maxRefusals = 64
	// arrivalRate bounds the connections in a second, whoever makes them, and arrivalBurst those
	// at once: to find out whose one is costs more than to connect. Others wait in the queue.
	arrivalRate  = 1000
	arrivalBurst = 100
	// checkInterval is the time between two looks at the process that has a lease.
	checkInterval = 3 * time.Second
	// stopTimeout bounds the wait for the clients when the agent stops.
	stopTimeout = 6 * time.Second
)

// Options configure a Server. All are required, but Runner.
type Options struct {
	Socket string        // path
	Policy policy.Policy // at first; see SetPolicy
	Limits Limits        // of each container
	// Container returns the container of a process by its cgroups. It fails closed.
	Container func(cgroups []string) (port.Owner, error)
	// Carry carries a connection that was accepted to a target of the publication, and
	// owns it (forward.Server.Carry).
	Carry  func(ctx context.Context, conn net.Conn, pub port.Publication) error
	Runner Runner // nil if no program may be run
	Logger *slog.Logger
}

// Runner runs programs for the clients of the socket.
type Runner interface {
	// Names reports whether the client may have any program run.
	Names(of ask.Client) bool
	// Allowed returns why the client may not have a request served, nil if it may.
	Allowed(of ask.Client, request json.RawMessage) error
	// Run serves a request of a client. Its error is for the client.
	Run(ctx context.Context, conn *net.UnixConn, of ask.Client, request json.RawMessage) error
}

// Server serves the socket. It is a source of the ports that containers publish.
type Server struct {
	opt     Options
	policy  atomic.Pointer[policy.Policy]
	log     *slog.Logger
	proc    string
	tree    *cgroup.Tree
	network namespace // the agent's own
	guest   guestNamespaces
	tenants tenants
	accept  *own.Acceptor // of the socket
	flows   *own.Acceptor // of all listeners that were passed
	arrive  *rate.Limiter
	refused rate.Sometimes
	feed    registry.Feed
	// containerOf is ownerOf, but for tests: the container of a process by its directory.
	containerOf func(dir int) (port.Owner, error)
	check       time.Duration // checkInterval, but for tests
	maxClients  int           // maxClients, but for tests

	mu     sync.Mutex
	leases map[netip.Addr]*hostLease // by the address that stands for the container
	last   netip.Addr                // of the latest lease
}

// New returns a server, which does nothing until Run.
func New(o Options) *Server {
	s := &Server{
		opt: o, log: o.Logger, proc: "/proc",
		tenants: tenants{limits: o.Limits, byID: make(map[string]*tenant)},
		accept:  own.NewAcceptor(o.Logger, own.ForControl), flows: own.NewAcceptor(o.Logger, own.ForFlow),
		arrive:  rate.NewLimiter(arrivalRate, arrivalBurst),
		refused: rate.Sometimes{Interval: time.Second},
		leases:  make(map[netip.Addr]*hostLease), last: targets.Addr(),
		check: checkInterval, maxClients: maxClients,
	}
	s.containerOf = s.ownerOf
	s.SetPolicy(o.Policy)
	return s
}

// SetPolicy has requests decided by p from now on. Leases and programs that it does not
// allow end within checkInterval.
func (s *Server) SetPolicy(p policy.Policy) { s.policy.Store(&p) }

// Name is the source's name.
func (s *Server) Name() string { return port.SourcePublish }

// Run serves until ctx ends. Where it cannot make the socket it tries again: an engine
// that starts first may have made a directory of that name to mount it, and a container
// that has the directory mounted may have put anything there.
func (s *Server) Run(ctx context.Context, feed registry.Feed) error {
	if err := s.open(); err != nil {
		return err
	}
	defer func() { _ = s.tree.Close() }()
	feed.Replace(nil)
	pause := schedule.Backoff{Min: time.Second, Max: time.Minute}
	for {
		l, err := link.ListenPackets(ctx, s.opt.Socket)
		if err == nil {
			feed.Method(s.opt.Socket)
			feed.Replace(nil) // it is live
			err = s.serve(ctx, l, feed)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		feed.Stale(fmt.Errorf("publish socket: %w", cmp.Or(err, net.ErrClosed)))
		if err := schedule.Sleep(ctx, pause.Next()); err != nil {
			return err
		}
	}
}

func (s *Server) open() (err error) {
	if s.tree, err = cgroup.Open(s.proc); err != nil {
		return err
	}
	// Not that of the first thread, which may have entered another one.
	if s.network, err = namespaceAt(unix.AT_FDCWD, s.proc+"/thread-self/ns/net"); err != nil {
		return err
	}
	s.guest, err = s.guestNamespaces()
	return err
}

// serve accepts clients until ctx ends, and returns when all leases have ended.
func (s *Server) serve(ctx context.Context, l net.Listener, feed registry.Feed) error {
	s.feed = feed
	ctx, cancel := context.WithCancel(ctx)
	var clients sync.WaitGroup
	clients.Go(func() {
		<-ctx.Done()
		_ = ask.CloseListener(l)
	})
	defer func() {
		cancel()
		waitAtMost(&clients, stopTimeout)
	}()
	room := make(chan struct{}, s.maxClients+maxRefusals)
	return s.accept.Serve(ctx, arrivals{l}, func(conn net.Conn) {
		_ = s.arrive.Wait(ctx)
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			_ = conn.Close()
			return
		}
		full := len(room) > s.maxClients
		clients.Go(func() {
			defer func() { <-room }()
			s.client(ctx, conn.(arrival).UnixConn, full)
		})
	})
}

// client serves one connection, and reports to it why it ended.
func (s *Server) client(ctx context.Context, conn *net.UnixConn, full bool) {
	stop := context.AfterFunc(ctx, func() { _ = conn.CloseRead() })
	defer stop()
	p, t, err := s.admit(conn, full)
	// The container is charged for it until all is closed.
	defer t.leave()
	defer p.close()
	defer ask.CloseClient(conn)
	if err == nil {
		err = s.request(ctx, conn, p, t)
	}
	s.report(ctx, conn, err)
}

// report sends a client why its connection ends.
func (s *Server) report(ctx context.Context, conn *net.UnixConn, err error) {
	var r *ask.Refusal
	switch {
	case ctx.Err() != nil:
		r = &ask.Refusal{Reason: ask.ReasonStopping, Message: "the agent stops"}
	case errors.Is(err, ask.ErrMalformed):
		r = &ask.Refusal{Reason: ask.ReasonRequest, Message: err.Error()}
	case !errors.As(err, &r):
		if err != nil {
			s.log.Debug("publish: client ended", "err", err)
		}
		return
	}
	if ctx.Err() == nil && r.Reason != ask.ReasonProgram { // which is logged already
		s.log.Debug("publish: request refused", "reason", r.Reason, "err", r.Message)
		s.refused.Do(func() { s.log.Warn("publish: request refused", "reason", r.Reason, "err", r.Message) })
	}
	_ = conn.SetWriteDeadline(time.Now().Add(requestTimeout))
	_ = ask.Send(conn, reply{Error: r})
}

// admit identifies a client, and counts it for its container. What it returns may be nil.
func (s *Server) admit(conn *net.UnixConn, full bool) (*peer, *tenant, error) {
	_ = conn.SetDeadline(time.Now().Add(requestTimeout))
	if full {
		return nil, nil, ask.Refuse(ask.ReasonLimit, "the agent has %d clients already", s.maxClients)
	}
	p, err := s.identify(conn)
	if err != nil {
		return nil, nil, err
	}
	if !s.names(p) {
		return p, nil, ask.Refuse(ask.ReasonPolicy, "no entry of publish.allow, run.allow or run.host matches %s", p.client())
	}
	t, err := s.tenants.enter(p.id())
	return p, t, err
}

// request serves the request of one client, and the lease if it is granted.
func (s *Server) request(ctx context.Context, conn *net.UnixConn, p *peer, t *tenant) error {
	nonce := ask.NewNonce()
	if err := ask.Send(conn, reply{Version: ask.Version, Nonce: nonce, TTY: true, HostRuns: true}); err != nil {
		return err
	}
	var q request
	got, err := ask.Receive(conn, &q)
	if err != nil {
		return err
	}
	defer got.Close()
	if err := s.confirm(p, got.Sender, q.Nonce, nonce); err != nil {
		return err
	}
	if q.Run != nil || p.guest {
		got.Close()
		return s.run(ctx, conn, p, q.Run)
	}
	if err := s.allowed(p, q); err != nil {
		return err
	}
	if got.Lost {
		return ask.Refuse(ask.ReasonLimit, "%v", own.ErrDescriptors)
	}
	l := lease{s: s, conn: conn, peer: p, tenant: t, request: q}
	allowed := func(p *peer) error { return s.allowed(p, q) }
	return s.whileAllowed(ctx, conn, p, allowed, func() error {
		if q.ToHost {
			return l.toHost(ctx, got)
		}
		return l.toGuest(ctx, &got)
	})
}

// whileAllowed runs serve, and ends the client's connection when its process ends or
// changes its container, or is not allowed any more what it asked for.
func (s *Server) whileAllowed(ctx context.Context, conn *net.UnixConn, p *peer, allowed func(*peer) error, serve func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		err := s.watch(ctx, p, allowed)
		if err != nil {
			_ = conn.CloseRead()
		}
		ended <- err
	}()
	err := serve()
	cancel()
	return cmp.Or(<-ended, err)
}

// names reports whether the client may ask for anything.
func (s *Server) names(p *peer) bool {
	return !p.guest && s.policy.Load().Names(p.container) || s.opt.Runner != nil && s.opt.Runner.Names(p.client())
}

// run serves a request for a program.
func (s *Server) run(ctx context.Context, conn *net.UnixConn, p *peer, request json.RawMessage) error {
	switch {
	case s.opt.Runner == nil:
		return ask.Refuse(ask.ReasonPolicy, "run.allow has no entry")
	case request == nil:
		return ask.Refuse(ask.ReasonPolicy, "only containers can ask for ports: the guest's own are published without help")
	}
	allowed := func(p *peer) error { return s.opt.Runner.Allowed(p.client(), request) }
	return s.whileAllowed(ctx, conn, p, allowed, func() error {
		return s.opt.Runner.Run(ctx, conn, p.client(), request)
	})
}

// allowed checks a request against the policy.
func (s *Server) allowed(p *peer, q request) error {
	name := strconv.Quote(p.container.Name)
	switch {
	case q.Port == 0 || q.ToHost == (q.As == 0):
		return ask.Refuse(ask.ReasonRequest, "port %d, as %d: want ports from 1 to 65535", q.Port, q.As)
	case q.ToHost && !s.policy.Load().Host(p.container, q.As):
		return ask.Refuse(ask.ReasonPolicy, "no entry of publish.allow gives container %s port %d of the host", name, q.As)
	case !q.ToHost && !s.policy.Load().Guest(p.container, q.Port):
		return ask.Refuse(ask.ReasonPolicy, "no entry of publish.allow lets container %s reach port %d of the guest", name, q.Port)
	}
	return nil
}

// lease is one granted request.
type lease struct {
	s       *Server
	conn    *net.UnixConn
	peer    *peer
	tenant  *tenant
	request request
}

// grant tells the client that the lease has begun.
func (l *lease) grant() error {
	if err := ask.Send(l.conn, reply{Granted: true}); err != nil {
		return err
	}
	l.log("began")
	return l.conn.SetDeadline(time.Time{})
}

func (l *lease) log(event string) {
	c := l.peer.container
	l.s.log.Info("publish lease", "event", event, "container", c.Name, "id", c.ID, "toHost", l.request.ToHost,
		"port", l.request.Port, "as", l.request.As, "pid", l.peer.pid)
}

// toGuest serves a lease that leads to a port of the guest's loopback.
func (l *lease) toGuest(ctx context.Context, got *ask.Packet) error {
	fd, ok := got.Take()
	if !ok {
		return ask.Refuse(ask.ReasonDescriptor, "%d descriptors, want one listening TCP socket", len(got.FDs))
	}
	if err := l.s.checkSocket(l.peer, fd, true); err != nil {
		ask.CloseFD(fd)
		return err
	}
	ln, err := listenerOf(fd)
	if err != nil {
		return err
	}
	defer closeListener(ln)
	if own.Scarce(ln, own.ForFlow) {
		return ask.Refuse(ask.ReasonLimit, "%v", own.ErrDescriptors)
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
		Key: port.Key{Protocol: port.TCP, Address: netip.AddrFrom4([4]byte{127, 0, 0, 1}), Port: number},
		Dial: []netip.AddrPort{
			netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), number),
			netip.AddrPortFrom(netip.IPv6Loopback(), number),
		},
	}
	_ = l.s.flows.Serve(ctx, ln, func(conn net.Conn) {
		// The client can bind the listener to another address meanwhile.
		if a, ok := conn.LocalAddr().(*net.TCPAddr); !ok || !a.IP.IsLoopback() || !l.tenant.connect() {
			forward.Reset(conn)
			return
		}
		flows.Go(func() {
			defer l.tenant.disconnect()
			_ = l.s.opt.Carry(ctx, conn, pub)
		})
	})
	close(served)
	flows.Wait()
	_ = l.conn.CloseRead() // the client may have closed its listener: the lease ends
}

// waitForEnd returns when the client has gone or ctx ends. The client has nothing to send.
func (l *lease) waitForEnd(ctx context.Context) error {
	var q request
	got, err := ask.Receive(l.conn, &q)
	got.Close()
	if err == nil {
		err = ask.Refuse(ask.ReasonRequest, "unexpected message")
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
