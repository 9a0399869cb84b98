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
	"github.com/fairlead/fairlead/internal/own"
	"github.com/fairlead/fairlead/internal/port"
)

// hold is one address that some claim is given. All but protocol and at, which
// never change, is guarded by Sink.mu.
type hold struct {
	protocol port.Protocol
	at       netip.AddrPort
	winner   *claim
	shared   []*claim // other claims that the winner serves

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
	p := &h.winner.pub
	h.due = time.Time{}
	own, settle := notServed, time.Duration(0)
	for _, c := range append([]*claim{h.winner}, h.shared...) {
		own = max(own, servedBy(&c.pub, h.at))
		settle = max(settle, s.settleTime(&c.pub, h.had))
	}
	if h.busy { // a server that is started again has the settle time anew
		h.since, h.busy = now, false
	}
	switch {
	case h.protocol == port.UDP && s.o.ServeUDP == nil:
		s.rest(h, port.Denied, "UDP is not asked for (listener.udp); WSL's relay carries none")
	case own == byItself:
		s.shut(h)
		h.busy, h.had, h.retry, h.until, h.pause = true, true, 0, time.Time{}, 0
		s.report(h, port.Active, h.at, "")
	case own == byIPv6Only:
		s.rest(h, port.Conflict, fmt.Sprintf("its own socket at [::]:%d holds IPv4 too, which WSL's relay shows at ::1 only", p.Port))
	case !relayed(h.at.Addr()):
		s.rest(h, port.Failed, "only 127.0.0.1, 0.0.0.0, ::1 and :: can be opened in the guest")
	case len(p.Dial) == 0:
		s.rest(h, port.Pending, "nothing is known to serve it")
	case h.open != nil:
		s.report(h, port.Active, h.bound, "")
	case s.taken(h, now):
	case now.Before(h.until):
		h.due = h.until
		s.report(h, port.Pending, h.at, "released for "+h.by+", which wants the port")
	case now.Before(h.since.Add(settle)):
		h.due = h.since.Add(settle)
		s.report(h, port.Pending, h.at, fmt.Sprintf("opens unless a server of its own does within %v", settle))
	case s.ctx == nil: // Run looks at it when it begins
		h.due = now
		s.report(h, port.Pending, h.at, "")
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
	s.report(h, state, h.at, reason)
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
	s.report(h, port.Conflict, h.at, fmt.Sprintf("%s is held by %s", h.at, by))
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
		s.report(h, port.Active, h.bound, "")
		return
	}
	s.watch(h.at.Port(), -1)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		s.stats.conflicts.Add(1)
		h.busy = true
		s.again(h, now, conflictMax)
		s.report(h, port.Conflict, h.at, fmt.Sprintf("%s is in use by another socket", h.at))
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		s.again(h, now, failureMax)
		s.report(h, port.Failed, h.at, fmt.Sprintf("listen on %s: permission denied: grant CAP_NET_BIND_SERVICE, "+
			"or remap the port by a rule (hostPort)", h.at))
	default:
		s.again(h, now, failureMax)
		s.report(h, port.Failed, h.at, err.Error())
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
		u := forward.NewClients(pc, func(from netip.AddrPort) (func(forward.Datagrams), *forward.Flow) {
			fctx, f, p := s.begin(ctx, h)
			return func(client forward.Datagrams) {
				s.finish(f, s.o.ServeUDP(fctx, client, forward.Request{Publication: p, Peer: from}))
			}, f
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
	err := own.Serve(ctx, ln, s.log, func(conn net.Conn) {
		fctx, f, p := s.begin(ctx, h)
		if f == nil {
			forward.Reset(conn)
			return
		}
		s.wg.Go(func() { s.finish(f, s.o.Serve(fctx, conn, p)) })
	})
	if err != nil {
		s.reopen(h, ln, err)
	}
}

// reopen closes a placeholder that can accept no more, and tries again later.
func (s *Sink) reopen(h *hold, ln net.Listener, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.open != ln {
		return
	}
	s.log.Warn("placeholder failed; opening it again", "placeholder", h, "err", err)
	s.shut(h)
	s.again(h, time.Now(), failureMax)
	s.report(h, port.Failed, h.at, err.Error())
	poke(s.wake)
	poke(s.kick)
}

// begin enters a flow of the claim that has the hold now; the flow is nil if the
// hold is closed or there are too many.
func (s *Sink) begin(ctx context.Context, h *hold) (context.Context, *forward.Flow, port.Publication) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.open == nil { // accepted while it was closed
		return ctx, nil, port.Publication{}
	}
	p := h.winner.pub
	ctx, f := s.flows.Begin(ctx, p.Key)
	if f == nil {
		s.stats.overLimit.Add(1)
	}
	return ctx, f, p
}

// finish ends a flow and counts it.
func (s *Sink) finish(f *forward.Flow, err error) {
	f.End()
	if err != nil {
		s.stats.failed.Add(1)
		return
	}
	s.stats.served.Add(1)
}
