// SPDX-License-Identifier: Apache-2.0

package listener

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/claims"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// placeholder is an address that some claim is given, with a listener if that is
// open. protocol and at never change; the rest is guarded by Sink.mu.
type placeholder struct {
	protocol port.Protocol
	at       netip.AddrPort
	winner   *claim
	shared   []*claim // other claims that the winner serves

	since  time.Time        // since when it could be opened
	busy   bool             // it could not, at the last update
	had    bool             // the publication had a socket of its own here
	failed bool             // the last attempt to open it failed because of the address
	beside bool             // so narrower addresses are open beside it; only of a wildcard
	rare   schedule.Backoff // between attempts then, for which these are closed
	retry  schedule.Backoff // between attempts to open it
	until  time.Time        // released until then
	rest   schedule.Backoff // how long it is released
	by     string           // for which program

	listener io.Closer // nil when not open
	bound    netip.AddrPort
	state    port.State  // that was reported
	reason   port.Reason // with it
}

func newPlaceholder(p port.Protocol, at netip.AddrPort, now time.Time) *placeholder {
	return &placeholder{protocol: p, at: at, since: now, rare: schedule.Backoff{Min: besideFirst, Max: besideMax}}
}

// takeOver lets a wildcard open at once in place of narrower placeholders that were open.
func (h *placeholder) takeOver(was map[netip.Addr]*placeholder) {
	if !port.IsWildcard(h.at.Addr()) {
		return
	}
	for _, o := range was {
		if o.state == port.Active && o.since.Before(h.since) {
			h.since = o.since
		}
	}
}

// update opens or closes a placeholder, reports the outcome, and plans the next
// update. s.mu is held.
func (s *Sink) update(h *placeholder, now time.Time) {
	p := &h.winner.pub
	if h.beside {
		s.report(h, h.state, h.at, h.reason)
		return
	}
	s.due.Cancel(h)
	h.failed = false
	own, settle := notServed, time.Duration(0)
	for _, c := range append([]*claim{h.winner}, h.shared...) {
		own = max(own, servedBy(&c.pub, h.at))
		settle = max(settle, s.settleTime(&c.pub, h.had))
	}
	if h.busy { // the settle time begins again, for a server that is restarted
		h.since, h.busy = now, false
	}
	switch {
	case h.protocol == port.UDP && s.o.ServeUDP == nil:
		s.block(h, port.Denied, port.Because(port.UDPDisabled))
	case own == byItself:
		s.shut(h)
		h.busy, h.had, h.until = true, true, time.Time{}
		h.retry.Reset()
		h.rest.Reset()
		s.report(h, port.Active, h.at, port.Reason{})
	case own == byIPv6Only:
		s.block(h, port.Conflict, port.Because(port.HeldByOwnSocket, strconv.Itoa(int(p.Port))))
	case !relayed(h.at.Addr()):
		s.block(h, port.Failed, port.Because(port.NotRelayed))
	case len(p.Dial) == 0:
		s.block(h, port.Pending, port.Because(port.Unserved))
	case h.listener != nil:
		s.report(h, port.Active, h.bound, port.Reason{})
	case s.occupied(h, now):
	case now.Before(h.until):
		s.due.Set(h, h.until)
		s.report(h, port.Pending, h.at, port.Because(port.Released, h.by))
	case now.Before(h.since.Add(settle)):
		s.due.Set(h, h.since.Add(settle))
		if h.reason.Code() == port.InUseSocket { // until it can be opened, or somebody is known to have it
			s.report(h, h.state, h.at, h.reason)
			return
		}
		s.report(h, port.Pending, h.at, port.Because(port.Settling, settle.String()))
	case s.ctx == nil: // Run will open it
		s.due.Set(h, now)
		s.report(h, port.Pending, h.at, port.Reason{})
	default:
		s.open(h, now)
	}
}

// relayed reports whether a relay shows listeners at a.
func relayed(a netip.Addr) bool { return port.IsWildcard(a) || a == port.Loopback(a) }

// block keeps a placeholder closed until something changes.
func (s *Sink) block(h *placeholder, state port.State, reason port.Reason) {
	s.shut(h)
	h.busy = true
	s.report(h, state, h.at, reason)
}

// occupied reports whether a known socket excludes the placeholder, if only a bound
// one.
func (s *Sink) occupied(h *placeholder, now time.Time) bool {
	if h.at.Port() == 0 {
		return false
	}
	by := holder(s.o.Sockets(port.Slot{Protocol: h.protocol, Port: h.at.Port()}), h.at)
	if by == "" {
		return false
	}
	h.busy = true
	s.retryIn(h, now, conflictMax)
	why := claims.Held(h.at, by)
	if p := &h.winner.pub; p.Port == h.at.Port() && slices.ContainsFunc(p.Origins, func(o port.OriginInfo) bool {
		return o.Source == port.SourceSocket && !o.Withheld.IsZero()
	}) {
		why = port.Because(port.HeldForItself, h.at.String(), by)
	}
	s.report(h, port.Conflict, h.at, why)
	return true
}

// retryIn plans the next attempt, after limit at the latest.
func (s *Sink) retryIn(h *placeholder, now time.Time, limit time.Duration) {
	h.retry.Min, h.retry.Max = conflictFirst, limit
	s.due.Set(h, now.Add(h.retry.Next()))
}

// open tries to open a placeholder.
func (s *Sink) open(h *placeholder, now time.Time) {
	// Before it is bound, so that no refused bind is missed.
	s.watch(h.at.Port(), 1)
	err := s.listen(s.ctx, h)
	h.failed = errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EACCES)
	if err == nil {
		h.retry.Reset()
		h.rare.Reset()
		s.stats.opened.Add(1)
		s.stats.open.Add(1)
		s.log.Debug("placeholder opened", "placeholder", h, "publication", h.winner.pub.Key)
		s.report(h, port.Active, h.bound, port.Reason{})
		return
	}
	s.watch(h.at.Port(), -1)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		s.stats.conflicts.Add(1)
		h.busy = true
		s.retryIn(h, now, conflictMax)
		s.report(h, port.Conflict, h.at, port.Because(port.InUseSocket, h.at.String()))
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		demand, pub := "", &h.winner.pub
		if list := pub.Demands(); len(list) > 0 {
			demand = list[0]
		}
		s.retryIn(h, now, failureMax)
		s.report(h, port.Failed, h.at, port.Because(port.NeedsPrivilege, h.at.String(), forwards.Elsewhere(pub.Slot(), demand, "", h.at.Port())))
	default:
		s.retryIn(h, now, failureMax)
		s.report(h, port.Failed, h.at, port.Because(port.SystemFailed, err.Error()))
	}
}

func (s *Sink) listen(ctx context.Context, h *placeholder) error {
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
		h.listener, h.bound = u, boundTo(pc.LocalAddr(), h.at)
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
	h.listener, h.bound = ln, boundTo(ln.Addr(), h.at)
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
func (s *Sink) shut(h *placeholder) {
	if h.listener == nil {
		return
	}
	if h.protocol == port.TCP {
		s.o.Keep(h.bound, false)
	}
	_ = h.listener.Close()
	h.listener = nil
	s.stats.open.Add(-1)
	s.watch(h.at.Port(), -1)
	s.log.Debug("placeholder closed", "placeholder", h)
}

// yield closes a placeholder for a program that wants its port.
func (s *Sink) yield(h *placeholder, now time.Time, who string) {
	s.shut(h)
	if now.Sub(h.until) > yieldMax { // the last time is long ago
		h.rest.Reset()
	}
	h.rest.Min, h.rest.Max = yieldFirst, yieldMax
	h.until, h.by = now.Add(h.rest.Next()), who
	s.update(h, now)
}

// watch counts the placeholders at a port, and watches the port while there are any.
func (s *Sink) watch(p uint16, n int) {
	if p == 0 { // no program asks for a port that the kernel chose
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

// accept serves the connections of a placeholder until it is closed.
func (s *Sink) accept(ctx context.Context, h *placeholder, ln net.Listener) {
	err := s.acceptor.Serve(ctx, ln, func(conn net.Conn) {
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

// reopen closes a placeholder that can accept no more, and plans to open it again.
func (s *Sink) reopen(h *placeholder, ln net.Listener, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.listener != ln {
		return
	}
	s.log.Warn("placeholder failed; opening it again", "placeholder", h, "err", err)
	s.shut(h)
	s.retryIn(h, time.Now(), failureMax)
	s.report(h, port.Failed, h.at, port.Because(port.SystemFailed, err.Error()))
	s.wake.Notify()
	s.timers.Notify()
}

// begin begins a flow of the placeholder's winner. The flow is nil if the placeholder
// is closed or there are too many flows.
func (s *Sink) begin(ctx context.Context, h *placeholder) (context.Context, *forward.Flow, port.Publication) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.listener == nil { // accepted while it was closed
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
