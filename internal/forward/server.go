// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
)

// replyTimeout bounds the wait for a stream to take the reply.
const replyTimeout = 10 * time.Second

// ServerOptions configure a Server. The zero value is usable.
type ServerOptions struct {
	// Logger receives flows that failed, at debug level. Nil discards.
	Logger *slog.Logger
	// Dial connects to a target in the guest; network is tcp or udp. A UDP
	// connection keeps datagrams apart. Nil means the net package, without MPTCP.
	Dial func(ctx context.Context, network string, target netip.AddrPort) (net.Conn, error)
	// Own reports whether a target is served by a listener of our own, which is
	// never dialled (own.Sockets.Serves). Nil means none is.
	Own func(port.Protocol, netip.AddrPort) bool
	// DialTimeout bounds the attempt at one target. 0 means 5 s.
	DialTimeout time.Duration
	// UDPIdle ends a UDP flow without datagrams in either direction. 0 means 60 s.
	UDPIdle time.Duration
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
		d := new(net.Dialer)
		d.SetMultipathTCP(false)
		o.Dial = func(ctx context.Context, network string, target netip.AddrPort) (net.Conn, error) {
			return d.DialContext(ctx, network, target.String())
		}
	}
	return nil
}

// Server is the guest's end of flows: it dials what a publication names and
// carries the bytes. It starts nothing by itself and is safe for concurrent use.
type Server struct {
	opt   ServerOptions
	meter Meter // A is the host
	stats struct {
		tcp, udp                 atomic.Int64
		ok, refused, unreachable atomic.Uint64
	}

	mu   sync.Mutex
	best map[bestKey]netip.AddrPort // the target that worked last
}

// bestKey tells families apart: a client over IPv6 may reach another server.
type bestKey struct {
	key port.Key
	is4 bool
}

// NewServer returns a server.
func NewServer(opt ServerOptions) (*Server, error) {
	if err := opt.validate(); err != nil {
		return nil, err
	}
	return &Server{opt: opt, best: make(map[bestKey]netip.AddrPort)}, nil
}

// Stats are counts since the start, but for the flows that are open now.
type Stats struct {
	OpenTCP, OpenUDP         int    // flows that are open now
	OK, Refused, Unreachable uint64 // answers to flow requests
	ToGuest, ToHost          uint64 // payload bytes
}

// Stats returns the counts.
func (s *Server) Stats() Stats {
	return Stats{
		OpenTCP: int(s.stats.tcp.Load()), OpenUDP: int(s.stats.udp.Load()),
		OK: s.stats.ok.Load(), Refused: s.stats.refused.Load(), Unreachable: s.stats.unreachable.Load(),
		ToGuest: s.meter.AToB.Load(), ToHost: s.meter.BToA.Load(),
	}
}

// Serve answers a request that was read and authorised, and carries the flow of
// the publication that it names until both directions ended; the end of ctx
// resets it. It owns stream. The error says why a flow did not end in order; it
// has been logged.
func (s *Server) Serve(ctx context.Context, stream link.Stream, pub port.Publication, req wire.FlowRequest) error {
	targets := s.targets(pub, req.Peer)
	open, serve := &s.stats.tcp, s.serveTCP
	if req.Key.Protocol == port.UDP {
		open, serve = &s.stats.udp, s.serveUDP
	}
	open.Add(1)
	defer open.Add(-1)
	err := serve(ctx, stream, targets, req)
	if err != nil {
		s.opt.Logger.Debug("flow ended", "publication", pub.Key, "peer", req.Peer, "error", err)
	}
	return err
}

func (s *Server) serveTCP(ctx context.Context, stream link.Stream, targets []netip.AddrPort, req wire.FlowRequest) error {
	conn, _, status, err := s.dial(ctx, "tcp", targets, req)
	if err != nil {
		return s.refuse(stream, status, err)
	}
	if err := s.accept(stream); err != nil {
		Reset(conn)
		return err
	}
	return Splice(ctx, stream, conn, &s.meter)
}

// targets orders the candidates: the one that worked last, then those of the
// peer's family, each as the publication has them.
func (s *Server) targets(pub port.Publication, peer netip.AddrPort) []netip.AddrPort {
	is4 := isIPv4(peer.Addr())
	s.mu.Lock()
	best, ok := s.best[bestKey{pub.Key, is4}]
	s.mu.Unlock()
	rank := func(a netip.AddrPort) int {
		switch {
		case ok && a == best:
			return 0
		case peer.IsValid() && isIPv4(a.Addr()) == is4:
			return 1
		}
		return 2
	}
	targets := slices.Clone(pub.Dial)
	slices.SortStableFunc(targets, func(a, b netip.AddrPort) int { return cmp.Compare(rank(a), rank(b)) })
	return targets
}

func isIPv4(a netip.Addr) bool { return a.Unmap().Is4() }

// worked remembers the target that a flow reached.
func (s *Server) worked(req wire.FlowRequest, target netip.AddrPort) {
	k := bestKey{req.Key, isIPv4(req.Peer.Addr())}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.best[k] == target {
		return
	}
	// Publications come and go; what is lost here is found again by dialling.
	if len(s.best) >= 2*wire.MaxPublications {
		clear(s.best)
	}
	s.best[k] = target
}

// accept tells the host that bytes may run.
func (s *Server) accept(stream link.Stream) error {
	_ = stream.SetDeadline(time.Now().Add(replyTimeout))
	if err := wire.WriteReply(stream, wire.FlowReply{Status: wire.FlowOK}); err != nil {
		_ = stream.Reset()
		return fmt.Errorf("flow reply: %w", err)
	}
	s.stats.ok.Add(1)
	return stream.SetDeadline(time.Time{})
}

// refuse tells the host why there is no flow.
func (s *Server) refuse(stream link.Stream, status wire.FlowStatus, reason error) error {
	if status == wire.FlowUnreachable {
		s.stats.unreachable.Add(1)
	} else {
		s.stats.refused.Add(1)
	}
	err := fmt.Errorf("%s: %w", status, reason)
	_ = stream.SetDeadline(time.Now().Add(replyTimeout))
	if werr := wire.WriteReply(stream, wire.FlowReply{Status: status, Reason: reason.Error()}); werr != nil {
		_ = stream.Reset()
		return errors.Join(err, fmt.Errorf("flow reply: %w", werr))
	}
	_ = stream.Close()
	return err
}
