// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peer

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	// RequestTimeout bounds the time between a connection and its request, and a write.
	RequestTimeout = 5 * time.Second
	// maxClients bounds the connections of all clients together, and maxRefusals those
	// that are refused because there are so many.
	maxClients  = 1024
	maxRefusals = 64
	// checkInterval is the time between two looks at the process that is a client.
	checkInterval = 3 * time.Second
	// stopTimeout bounds the wait for the clients when the server stops.
	stopTimeout = 6 * time.Second

	proc = "/proc"
)

// Options configure a Server.
type Options struct {
	Socket string // path
	Limits Limits // of each client
	// Container returns the container of a process by its cgroups. It fails closed: with a
	// Refusal for ReasonAgent where it cannot tell, so that the process is nobody's.
	Container func(ctx context.Context, cgroups []string) (port.Owner, error)
	// Guests says that processes of the guest, which are in no container, may be clients.
	Guests bool
	// Admit returns why the client may ask for nothing at all, nil if it may.
	Admit func(Client) error
	// Serve serves a client. A *Refusal is sent to it.
	Serve func(ctx context.Context, c *Conn) error
	// Arrivals bounds the connections in a second, whoever makes them: to find out whose one
	// is costs more than to connect. Others wait in the queue.
	Arrivals *rate.Limiter
	Logger   *slog.Logger

	// These are for tests; a server has defaults.
	ContainerAt func(dir int) (port.Owner, error) // instead of Container, by a process's directory in /proc
	Check       time.Duration                     // between two looks at a client's process
	MaxClients  int
}

// Server serves a socket that is mounted into containers.
type Server struct {
	Options
	Tenants *Tenants // who uses it

	guest   guestNamespaces
	accept  *own.Acceptor
	refused rate.Sometimes
}

// NewServer returns a server, which does nothing until Run.
func NewServer(o Options) *Server {
	o.Check, o.MaxClients = cmp.Or(o.Check, checkInterval), cmp.Or(o.MaxClients, maxClients)
	return &Server{
		Options: o, Tenants: newTenants(o.Limits), accept: own.NewAcceptor(o.Logger, own.ForControl),
		refused: rate.Sometimes{Interval: time.Second},
	}
}

// Run serves until ctx ends. Where it cannot make the socket it tries again: an engine
// that starts first may have made a directory of that name to mount it, and a container
// that has the directory mounted may have put anything there. It calls made when the socket
// is there, and failed when it is not.
func (s *Server) Run(ctx context.Context, made func(), failed func(error)) error {
	var err error
	if s.guest, err = namespacesHere(); err != nil {
		return err
	}
	pause := schedule.Backoff{Min: time.Second, Max: time.Minute}
	for {
		l, err := link.ListenPackets(ctx, s.Socket)
		if err == nil {
			made()
			err = s.serve(ctx, l)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		failed(cmp.Or(err, net.ErrClosed))
		if err := schedule.Sleep(ctx, pause.Next()); err != nil {
			return err
		}
	}
}

// serve accepts clients until ctx ends, and returns when all have been served.
func (s *Server) serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var clients sync.WaitGroup
	clients.Go(func() {
		<-ctx.Done()
		_ = CloseListener(l)
	})
	defer func() {
		cancel()
		waitAtMost(&clients, stopTimeout)
	}()
	room := make(chan struct{}, s.MaxClients+maxRefusals)
	return s.accept.Serve(ctx, arrivals{l}, func(conn net.Conn) {
		_ = s.Arrivals.Wait(ctx)
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			_ = conn.Close()
			return
		}
		full := len(room) > s.MaxClients
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
	c := &Conn{UnixConn: conn, server: s, dir: -1}
	err := s.admit(ctx, c, full)
	// The client is charged for it until all is closed.
	defer c.Tenant.leave()
	defer c.close()
	defer CloseClient(conn)
	if err == nil {
		err = s.Serve(ctx, c)
	}
	s.report(ctx, conn, err)
}

// report sends a client why its connection ends.
func (s *Server) report(ctx context.Context, conn *net.UnixConn, err error) {
	var r *Refusal
	switch {
	case ctx.Err() != nil:
		r = &Refusal{Reason: ReasonStopping, Message: "the server stops"}
	case errors.Is(err, ErrMalformed):
		r = &Refusal{Reason: ReasonRequest, Message: err.Error()}
	case !errors.As(err, &r):
		if err != nil {
			s.Logger.Debug("client ended", "socket", s.Socket, "err", err)
		}
		return
	}
	if ctx.Err() == nil && r.Reason != ReasonProgram { // which is logged already
		s.Logger.Debug("request refused", "socket", s.Socket, "reason", r.Reason, "err", r.Message)
		s.refused.Do(func() { s.Logger.Warn("request refused", "socket", s.Socket, "reason", r.Reason, "err", r.Message) })
	}
	_ = conn.SetWriteDeadline(time.Now().Add(RequestTimeout))
	_ = Send(conn, Hello{Error: r})
}

// admit identifies a client, and counts it.
func (s *Server) admit(ctx context.Context, c *Conn, full bool) error {
	_ = c.SetDeadline(time.Now().Add(RequestTimeout))
	if full {
		return Refuse(ReasonLimit, "there are %d clients already", s.MaxClients)
	}
	if err := c.identify(ctx); err != nil {
		return err
	}
	if err := s.Admit(c.Client); err != nil {
		return err
	}
	var err error
	c.Tenant, err = s.Tenants.Enter(c.id())
	return err
}

// arrival is a connection that was accepted. Close does not wait, because the goroutine
// that accepts calls it.
type arrival struct{ *net.UnixConn }

// Close implements net.Conn.
func (a arrival) Close() error {
	go CloseClient(a.UnixConn)
	return nil
}

// arrivals is a listener whose connections are arrivals.
type arrivals struct{ net.Listener }

// Accept implements net.Listener.
func (l arrivals) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return arrival{conn.(*net.UnixConn)}, nil
}

// waitAtMost waits for a group, but no longer than d.
func waitAtMost(group *sync.WaitGroup, d time.Duration) {
	done := make(chan struct{})
	go func() {
		group.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(d):
	}
}
