// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/port"
)

// maxRemembered bounds the targets that a Server remembers.
const maxRemembered = 131_072

// ServerOptions configure a Server. The zero value is usable.
type ServerOptions struct {
	// Logger receives flows that failed, at debug level. Nil discards.
	Logger *slog.Logger
	// Dial connects to a target in the guest; network is tcp or udp. A UDP
	// connection keeps datagrams apart. Nil means DialGuest.
	Dial func(ctx context.Context, network string, target netip.AddrPort) (net.Conn, error)
	// Own reports whether a listener of our own serves a target, which is then
	// never dialled (own.Sockets.Serves). Nil means none is.
	Own func(port.Protocol, netip.AddrPort) bool
	// DialTimeout bounds the attempt at one target. 0 means 5 s.
	DialTimeout time.Duration
	// UDPIdle ends a UDP flow without datagrams in either direction. 0 means 60 s.
	UDPIdle time.Duration
	// Trace reports flows to those who debug a port. Nil reports none.
	Trace *trace.Hub
}

func (o *ServerOptions) validate() error {
	for _, d := range []struct {
		name string
		v    *time.Duration
		def  time.Duration
	}{{"DialTimeout", &o.DialTimeout, 5 * time.Second}, {"UDPIdle", &o.UDPIdle, time.Minute}} {
		if *d.v < 0 {
			return fmt.Errorf("forward: %s %v: want a positive duration", d.name, *d.v)
		}
		*d.v = cmp.Or(*d.v, d.def)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Own == nil {
		o.Own = func(port.Protocol, netip.AddrPort) bool { return false }
	}
	if o.Dial == nil {
		o.Dial = DialGuest
	}
	return nil
}

// DialGuest connects to a target by the net package, without MPTCP. A TCP connection is
// Abortive.
func DialGuest(ctx context.Context, network string, target netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{Control: AbortiveDial}
	d.SetMultipathTCP(false)
	return d.DialContext(ctx, network, target.String())
}

// Server is the guest's end of flows: it dials the targets of a publication and
// moves the bytes. It starts nothing by itself and is safe for concurrent use.
type Server struct {
	opt   ServerOptions
	meter Meter // A is the client's side
	stats struct {
		tcp, udp                 atomic.Int64
		ok, refused, unreachable atomic.Uint64
		scarce                   atomic.Uint64
	}
	scarce rate.Sometimes // warns that descriptors are scarce

	mu   sync.Mutex
	best map[bestKey]bestTarget
}

// bestKey includes the family: a client over IPv6 may reach another server.
type bestKey struct {
	key port.Key
	is4 bool
}

// bestTarget is the target that worked last, of those that the publication had then.
type bestTarget struct {
	target netip.AddrPort
	of     []netip.AddrPort
}

// NewServer returns a server.
func NewServer(opt ServerOptions) (*Server, error) {
	if err := opt.validate(); err != nil {
		return nil, err
	}
	return &Server{opt: opt, scarce: rate.Sometimes{Interval: time.Minute}, best: make(map[bestKey]bestTarget)}, nil
}

// Stats are counts since the start, but for the flows that are open now.
type Stats struct {
	OpenTCP          int    `metric:"flows_open" label:"protocol=tcp" help:"Currently open flows."`
	OpenUDP          int    `metric:"flows_open" label:"protocol=udp"`
	OK               uint64 `metric:"flow_answers_total" label:"result=ok" help:"Replies to the host's flow requests."`
	Refused          uint64 `metric:"flow_answers_total" label:"result=refused"`
	Unreachable      uint64 `metric:"flow_answers_total" label:"result=unreachable"`
	OutOfDescriptors uint64 `metric:"flow_answers_total" label:"result=descriptors: too few were left"`
	ToGuest          uint64 `metric:"flow_bytes_total" label:"direction=to_guest" help:"Payload bytes forwarded."`
	ToHost           uint64 `metric:"flow_bytes_total" label:"direction=to_host"`
}

// Stats returns the counts.
func (s *Server) Stats() Stats {
	return Stats{
		OpenTCP: int(s.stats.tcp.Load()), OpenUDP: int(s.stats.udp.Load()),
		OutOfDescriptors: s.stats.scarce.Load(),
		OK:               s.stats.ok.Load(), Refused: s.stats.refused.Load(), Unreachable: s.stats.unreachable.Load(),
		ToGuest: s.meter.AToB.Load(), ToHost: s.meter.BToA.Load(),
	}
}

// Serve opens the TCP flow that req asks for, and moves the bytes of client to and
// from a target until both directions ended; the end of ctx resets it. It owns
// client, which is reset if the flow cannot be opened and nobody waits for an
// answer. The error is why the flow did not end in order; it has been logged.
func (s *Server) Serve(ctx context.Context, client net.Conn, req Request) error {
	s.stats.tcp.Add(1)
	defer s.stats.tcp.Add(-1)
	flow := s.trace(req)
	err := s.serveTCP(trace.With(ctx, flow), client, req)
	flow.End(err)
	s.log(req, err)
	return err
}

// ServeUDP is Serve for the datagrams of a UDP client. It also ends, in order,
// after UDPIdle without any.
func (s *Server) ServeUDP(ctx context.Context, client Datagrams, req Request) error {
	s.stats.udp.Add(1)
	defer s.stats.udp.Add(-1)
	flow := s.trace(req)
	err := s.serveUDP(trace.With(ctx, flow), client, req)
	flow.End(err)
	s.log(req, err)
	return err
}

// trace begins to trace a flow; nil if nobody wants that.
func (s *Server) trace(req Request) *trace.Flow {
	return s.opt.Trace.Begin(trace.Subject{Key: req.Publication.Key, Peer: req.Peer})
}

func (s *Server) log(req Request, err error) {
	if err != nil {
		s.opt.Logger.Debug("flow ended", "publication", req.Publication.Key, "peer", req.Peer, "err", err)
	}
}

func (s *Server) serveTCP(ctx context.Context, client net.Conn, req Request) error {
	Abortive(client)
	conn, _, err := s.dial(ctx, "tcp", s.targets(req), req)
	if err != nil {
		return s.refuse(client, req, err)
	}
	if err := s.accept(client, req); err != nil {
		Reset(conn)
		return err
	}
	if err := s.announce(conn, req); err != nil {
		Reset(client)
		Reset(conn)
		return err
	}
	return Splice(ctx, client, conn, &s.meter)
}

// targets orders the candidates: the one that worked last, then those of the
// peer's family, each as the publication has them.
func (s *Server) targets(req Request) []netip.AddrPort {
	is4 := isIPv4(req.Peer.Addr())
	s.mu.Lock()
	best, ok := s.best[bestKey{req.Publication.Key, is4}]
	s.mu.Unlock()
	ok = ok && slices.Equal(best.of, req.Publication.Dial)
	precedence := func(a netip.AddrPort) int {
		switch {
		case ok && a == best.target:
			return 0
		case req.Peer.IsValid() && isIPv4(a.Addr()) == is4:
			return 1
		}
		return 2
	}
	targets := slices.Clone(req.Publication.Dial)
	slices.SortStableFunc(targets, func(a, b netip.AddrPort) int { return cmp.Compare(precedence(a), precedence(b)) })
	return targets
}

func isIPv4(a netip.Addr) bool { return a.Unmap().Is4() }

// worked remembers the target that a flow reached.
func (s *Server) worked(req Request, target netip.AddrPort) {
	k := bestKey{req.Publication.Key, isIPv4(req.Peer.Addr())}
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.best[k]; b.target == target && slices.Equal(b.of, req.Publication.Dial) {
		return
	}
	// Publications come and go; what is forgotten is found again by dialling.
	if len(s.best) >= maxRemembered {
		clear(s.best)
	}
	s.best[k] = bestTarget{target, req.Publication.Dial}
}

// accept reports that the flow is open.
func (s *Server) accept(client io.Closer, req Request) error {
	if req.Answer != nil {
		if err := req.Answer(nil); err != nil {
			Reset(client)
			return fmt.Errorf("flow reply: %w", err)
		}
	}
	s.stats.ok.Add(1)
	return nil
}

// refuse reports why there is no flow, a *DialError, and closes the client's side.
func (s *Server) refuse(client io.Closer, req Request, err error) error {
	var d *DialError
	switch {
	case errors.As(err, &d) && d.Refused:
		s.stats.refused.Add(1)
	case errors.Is(err, own.ErrDescriptors):
		s.stats.scarce.Add(1)
	default:
		s.stats.unreachable.Add(1)
	}
	if req.Answer == nil {
		Reset(client)
		return err
	}
	if aerr := req.Answer(err); aerr != nil {
		Reset(client)
		return errors.Join(err, fmt.Errorf("flow reply: %w", aerr))
	}
	_ = client.Close()
	return err
}
