// SPDX-License-Identifier: Apache-2.0

package listener

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/forward"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
)

// hold is one address that some claim is given. All but protocol and at, which
// never change, is guarded by Sink.mu.
type hold struct {
	protocol port.Protocol
	at       netip.AddrPort
	winner   *claim

	since time.Time     // since when it could be opened
	busy  bool          // it could not, the last time it was looked at
	had   bool          // the publication had a socket of its own here
	due   time.Time     // when to decide again; zero: when something changes
	retry time.Duration // pause before the next attempt
	until time.Time     // released until then
	pause time.Duration // how long it was released the last time
	by    string        // for whom

	open  io.Closer // nil when not open
	bound netip.AddrPort
}

// decide makes a hold what it ought to be now. s.mu is held.
func (s *Sink) decide(h *hold, now time.Time) {
	c := h.winner
	p := &c.pub
	h.due = time.Time{}
	settle := s.settle(p, h.had)
	own := servedBy(p, h.at)
	if h.busy { // a server that is started again has the settle time anew
		h.since, h.busy = now, false
	}
	switch {
	case h.protocol == port.UDP && s.o.ServeUDP == nil:
		s.rest(h, port.Denied, "UDP is not asked for (listener.udp); WSL's relay carries none")
	case own == byItself:
		s.shut(h)
		h.busy, h.had, h.retry, h.until, h.pause = true, true, 0, time.Time{}, 0
		s.say(c, port.Active, h.at, "")
	case own == byIPv6Only:
		s.rest(h, port.Conflict, fmt.Sprintf("its own socket at [::]:%d holds IPv4 too, which WSL's relay shows at ::1 only", p.Port))
	case !relayed(h.at.Addr()):
		s.rest(h, port.Failed, "only 127.0.0.1, 0.0.0.0, ::1 and :: can be opened in the guest")
	case len(p.Dial) == 0:
		s.rest(h, port.Pending, "nothing is known to serve it")
	case h.open != nil:
		s.say(c, port.Active, h.bound, "")
	case s.taken(h, now):
	case now.Before(h.until):
		h.due = h.until
		s.say(c, port.Pending, h.at, "released for "+h.by+", which wants the port")
	case now.Before(h.since.Add(settle)):
		h.due = h.since.Add(settle)
		s.say(c, port.Pending, h.at, fmt.Sprintf("opens unless a server of its own does within %v", settle))
	case s.ctx == nil: // Run looks at it when it begins
		h.due = now
		s.say(c, port.Pending, h.at, "")
	default:
		s.try(h, now)
	}
}

// relayed reports whether a placeholder can stand at a: a relay looks at these.
func relayed(a netip.Addr) bool { return port.IsWildcard(a) || a == port.Loopback(a) }

// rest closes a hold until something changes.
func (s *Sink) rest(h *hold, state port.State, reason string) {
	s.shut(h)
	h.busy = true
	s.say(h.winner, state, h.at, reason)
}

// taken looks for a socket in the way, if only a bound one.
func (s *Sink) taken(h *hold, now time.Time) bool {
	if h.at.Port() == 0 {
		return false
	}
	by := holder(s.o.Sockets(port.Slot{Protocol: h.protocol, Port: h.at.Port()}), h.at)
	if by == "" {
		return false
	}
	h.busy = true
	s.again(h, now, conflictMax)
	s.say(h.winner, port.Conflict, h.at, fmt.Sprintf("%s is held by %s", h.at, by))
	return true
}

func (s *Sink) again(h *hold, now time.Time, limit time.Duration) {
	h.retry = min(max(2*h.retry, conflictFirst), limit)
	h.due = now.Add(h.retry)
}

// try opens a placeholder.
func (s *Sink) try(h *hold, now time.Time) {
	// Before it is bound, so that nobody is refused the port unseen.
	s.watch(h.at.Port(), 1)
	err := s.listen(s.ctx, h)
	if err == nil {
		h.retry = 0
		s.stats.opened.Add(1)
		s.stats.open.Add(1)
		s.log.Debug("placeholder opened", "placeholder", h, "publication", h.winner.pub.Key)
		s.say(h.winner, port.Active, h.bound, "")
		return
	}
	s.watch(h.at.Port(), -1)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		s.stats.conflicts.Add(1)
		h.busy = true
		s.again(h, now, conflictMax)
		s.say(h.winner, port.Conflict, h.at, fmt.Sprintf("%s is in use by another socket", h.at))
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		s.again(h, now, failureMax)
		s.say(h.winner, port.Failed, h.at, fmt.Sprintf("listen on %s: permission denied: grant CAP_NET_BIND_SERVICE, "+
			"or remap the port by a rule (hostPort)", h.at))
	default:
		s.again(h, now, failureMax)
		s.say(h.winner, port.Failed, h.at, err.Error())
	}
}

func (s *Sink) listen(ctx context.Context, h *hold) error {
	family := "6" // IPv6 only: the other family has a placeholder of its own
	if h.at.Addr().Is4() {
		family = "4"
	}
	if h.protocol == port.UDP {
		pc, err := s.o.Network.ListenPacket(ctx, "udp"+family, h.at.String())
		if err != nil {
			return err
		}
		u := forward.NewClients(pc, func(from netip.AddrPort) (func(link.Stream), func(), bool) {
			p, f, ok := s.begin(ctx, h)
			if !ok {
				return nil, nil, false
			}
			return func(stream link.Stream) {
				s.finish(f, s.o.ServeUDP(f.ctx, stream, p, wire.FlowRequest{Key: p.Key, Peer: from}))
			}, func() { f.cut(net.ErrClosed) }, true
		})
		h.open, h.bound = u, boundTo(pc.LocalAddr(), h.at)
		s.wg.Go(func() { u.Run(ctx) })
		return nil
	}
	ln, err := s.o.Network.ListenExclusive(ctx, "tcp"+family, h.at.String())
	if errors.Is(err, syscall.EADDRINUSE) && leftOver(h.at.Port()) {
		ln, err = s.o.Network.Listen(ctx, "tcp"+family, h.at.String())
	}
	if err != nil {
		return err
	}
	h.open, h.bound = ln, boundTo(ln.Addr(), h.at)
	s.o.Keep(h.bound, true)
	s.wg.Go(func() { s.accept(ctx, h, ln) })
	return nil
}

func boundTo(a net.Addr, asked netip.AddrPort) netip.AddrPort {
	if v, ok := a.(interface{ AddrPort() netip.AddrPort }); ok {
		return netip.AddrPortFrom(v.AddrPort().Addr().Unmap(), v.AddrPort().Port())
	}
	return asked
}

// shut closes a placeholder; its flows go on.
func (s *Sink) shut(h *hold) {
	if h.open == nil {
		return
	}
	if h.protocol == port.TCP {
		s.o.Keep(h.bound, false)
	}
	_ = h.open.Close()
	h.open = nil
	s.stats.open.Add(-1)
	s.watch(h.at.Port(), -1)
	s.log.Debug("placeholder closed", "placeholder", h)
}

// yield gives a placeholder up to somebody who wants its port.
func (s *Sink) yield(h *hold, now time.Time, who string) {
	s.shut(h)
	h.pause = min(max(2*h.pause, yieldFirst), yieldMax)
	h.until, h.by = now.Add(h.pause), who
	s.decide(h, now)
}

// watch counts the placeholders at a port, which are told once.
func (s *Sink) watch(p uint16, n int) {
	if p == 0 { // nobody wants a port that the kernel chose
		return
	}
	was := s.watched[p]
	s.watched[p] += n
	switch {
	case was == 0:
		s.o.Watch(p, true)
	case s.watched[p] == 0:
		delete(s.watched, p)
		s.o.Watch(p, false)
	}
}

// accept serves what reaches a placeholder, until it is closed.
func (s *Sink) accept(ctx context.Context, h *hold, ln net.Listener) {
	const pauseMax = time.Second
	pause := time.Duration(0)
	for {
		conn, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // want of descriptors or memory, or a client that is gone already
			pause = min(max(2*pause, 5*time.Millisecond), pauseMax)
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
			continue
		}
		pause = 0
		p, f, ok := s.begin(ctx, h)
		if !ok {
			forward.Reset(conn)
			continue
		}
		s.wg.Go(func() { s.finish(f, s.o.Serve(f.ctx, conn, p)) })
	}
}

// flow is one client that is served.
type flow struct {
	ctx context.Context //nolint:containedctx // of the flow alone
	cut context.CancelCauseFunc
	key port.Key
}

// begin enters a flow of the claim that has the hold now.
func (s *Sink) begin(ctx context.Context, h *hold) (port.Publication, *flow, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.open == nil { // what was accepted while it was closed
		return port.Publication{}, nil, false
	}
	if s.stats.flows.Load() >= int64(s.o.MaxFlows) {
		s.stats.overLimit.Add(1)
		return port.Publication{}, nil, false
	}
	s.stats.flows.Add(1)
	f := &flow{key: h.winner.pub.Key}
	f.ctx, f.cut = context.WithCancelCause(ctx)
	if s.flows[f.key] == nil {
		s.flows[f.key] = make(map[*flow]struct{})
	}
	s.flows[f.key][f] = struct{}{}
	return h.winner.pub, f, true
}

// finish takes a flow that ended out of the books.
func (s *Sink) finish(f *flow, err error) {
	f.cut(nil)
	s.mu.Lock()
	delete(s.flows[f.key], f)
	if len(s.flows[f.key]) == 0 {
		delete(s.flows, f.key)
	}
	s.mu.Unlock()
	s.stats.flows.Add(-1)
	if err != nil {
		s.stats.failed.Add(1)
		return
	}
	s.stats.served.Add(1)
}
