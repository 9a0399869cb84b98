// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/claims"
)

// Held is an address at which this program listens for itself: no publication gets it.
type Held struct {
	At netip.AddrPort
	By string // human-readable: "names of containers (--names)"
}

// heldFor returns who of this program holds an address, if anybody does.
func (h *Host) heldFor(protocol port.Protocol, addr netip.AddrPort) (Held, bool) {
	for _, held := range h.opt.Held {
		if protocol == port.TCP && held.overlaps(addr) {
			return held, true
		}
	}
	return Held{}, false
}

// overlaps reports whether a publication at an address would be in the way. localhost is 127.0.0.1
// and ::1: what is held at one of them is held at both, or one name would lead to two servers.
func (h Held) overlaps(addr netip.AddrPort) bool {
	localhost := []netip.AddrPort{
		netip.AddrPortFrom(port.Loopback(netip.IPv4Unspecified()), h.At.Port()), netip.AddrPortFrom(netip.IPv6Loopback(), h.At.Port()),
	}
	by := func(a netip.AddrPort) func(netip.AddrPort) bool {
		return func(b netip.AddrPort) bool { return claims.Overlap(a, b) }
	}
	return claims.Overlap(h.At, addr) || slices.ContainsFunc(localhost, by(h.At)) && slices.ContainsFunc(localhost, by(addr))
}

// Reach is a connection that is to reach a publication other than at its own listeners.
type Reach struct {
	ID    ID
	Owner port.Owner     // who must serve it
	Peer  netip.AddrPort // the client
	At    netip.AddrPort // where the client connected
}

// Why a publication cannot be reached. ErrDenied and ErrPending are the decisions of the
// host's rules.
var (
	ErrDenied    = errDenied
	ErrPending   = errPending
	ErrWithdrawn = errWithdrawn
	ErrLimit     = errors.New("too many connections to this guest")

	// ErrNotReached marks errors of Carry that came before a byte was moved.
	ErrNotReached = errors.New("not reached")

	errOwner = errors.New("somebody else serves the port now")
	errWider = errors.New("not open at this address by the host's rules")
)

// targetOf returns the target of a connection that may reach a publication now, and whether
// the publication is open for a time only. Whether a listener of its own is open does not
// count. From the loopback each publication that the rules open can be reached, from
// elsewhere those that the rules open there.
func (h *Host) targetOf(r *Reach) (c *target, exposed bool, err error) {
	l := h.lock()
	defer l.unlock()
	var pub *publication
	for _, g := range l.guests {
		if g.name == r.ID.Guest {
			pub = g.pubs[r.ID.Key]
		}
	}
	switch {
	case pub == nil:
		return nil, false, errWithdrawn
	case pub.denied != nil && pub.denied.State == port.Pending:
		return nil, false, fmt.Errorf("%w: %s", errPending, pub.denied.Reason)
	case pub.denied != nil:
		return nil, false, errDenied
	case !pub.fact.Owner.Same(r.Owner):
		return nil, false, errOwner
	}
	for _, c := range pub.claims {
		if r.At.Addr().IsLoopback() || claims.Overlap(c.addr, netip.AddrPortFrom(r.At.Addr(), c.addr.Port())) {
			return &c.target, !pub.exposed.IsZero(), nil
		}
	}
	return nil, false, errWider
}

// Reachable returns why a publication cannot be reached, by what is known now.
func (h *Host) Reachable(r Reach) error {
	_, _, err := h.targetOf(&r)
	return err
}

// reached is a flow to a publication that the guest has accepted.
type reached struct {
	link.Stream
	h     *Host
	flow  *forward.Flow
	trace *trace.Flow
	stop  func() error // keeps it from being reset any more; why it was
	over  sync.Once
}

// reach opens a flow, and returns the context that ends when it is to end: with life, or by
// the rules. ctx bounds the attempt.
func (h *Host) reach(ctx, life context.Context, r *Reach) (*reached, context.Context, error) {
	c, exposed, err := h.targetOf(r)
	if err != nil {
		return nil, nil, err
	}
	life, f := c.guest.flows.Begin(life, c.key)
	if f == nil {
		h.stats.overLimit.Add(1)
		return nil, nil, ErrLimit
	}
	if !r.At.Addr().IsLoopback() {
		f.Outside(exposed)
	}
	h.stats.tcp.Add(1)
	out := &reached{h: h, flow: f, trace: h.trace(c, r.Peer)}
	// A denial between the first look and Begin did not find the flow in the book.
	if _, _, err = h.targetOf(r); err == nil {
		attempt, cancel := context.WithCancelCause(life)
		given := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
		out.Stream, err = h.stream(attempt, c, r.Peer, r.At)
		given()
		cancel(nil)
	}
	if err == nil { // what was dialled may be another server's by now
		if _, _, err = h.targetOf(r); err != nil {
			_ = out.Stream.Reset()
		}
	}
	if err != nil {
		out.end(err)
		return nil, nil, err
	}
	out.stop = out.resetWith(life)
	return out, life, nil
}

// resetWith has the stream reset when a context ends, until the function is called.
func (r *reached) resetWith(ctx context.Context) func() error {
	stop := context.AfterFunc(ctx, func() { _ = r.Stream.Reset() })
	return func() error {
		if stop() {
			return nil
		}
		return context.Cause(ctx)
	}
}

// end takes the flow out of the books, once.
func (r *reached) end(err error) {
	r.over.Do(func() {
		r.trace.End(err)
		r.flow.End()
		r.h.stats.tcp.Add(-1)
	})
}

// Carry moves bytes between a client and a publication until both directions ended, and
// closes conn. The guest gets first before what the client sends from now on.
func (h *Host) Carry(ctx context.Context, conn net.Conn, first []byte, r Reach) error {
	forward.Abortive(conn)
	to, life, err := h.reach(ctx, ctx, &r)
	if err != nil {
		forward.Reset(conn)
		return fmt.Errorf("%w: %w", ErrNotReached, err)
	}
	_, err = to.Write(first)
	err = cmp.Or(to.stop(), err) // Splice watches the context itself
	if err == nil {
		err = forward.Splice(trace.With(life, to.trace), conn, to.Stream, &h.meter)
	} else {
		forward.Reset(conn)
		_ = to.Stream.Reset()
	}
	to.end(err)
	return err
}

// Dial returns a connection to a publication, which the caller closes or resets. It is reset when
// life ends, or when the rules deny the publication; ctx bounds the attempt.
func (h *Host) Dial(ctx, life context.Context, r Reach) (link.Stream, error) {
	to, _, err := h.reach(ctx, life, &r)
	if err != nil {
		return nil, err
	}
	return to, nil
}

// Read implements net.Conn.
func (r *reached) Read(b []byte) (int, error) {
	n, err := r.Stream.Read(b)
	r.h.meter.BToA.Add(uint64(n))
	r.trace.Moved(trace.ToHost, n, b[:n])
	return n, err
}

// Write implements net.Conn.
func (r *reached) Write(b []byte) (int, error) {
	n, err := r.Stream.Write(b)
	r.h.meter.AToB.Add(uint64(n))
	r.trace.Moved(trace.ToGuest, n, b[:n])
	return n, err
}

// AwaitReset is forward.AwaitReset of the stream.
func (r *reached) AwaitReset() error { return forward.AwaitReset(r.Stream) }

// Close implements net.Conn.
func (r *reached) Close() error { return r.finish(r.Stream.Close, nil) }

// Reset implements link.Stream.
func (r *reached) Reset() error { return r.finish(r.Stream.Reset, link.ErrReset) }

// finish ends the stream for a reason, unless it is reset already.
func (r *reached) finish(end func() error, why error) error {
	if err := r.stop(); err != nil {
		r.end(err)
		return nil
	}
	err := end()
	r.end(why)
	return err
}

// Listen opens a listener of this program at an address of TCP, in the way of those of
// publications: not where another program already serves it, on any system.
func (h *Host) Listen(ctx context.Context, at netip.AddrPort) (net.Listener, error) {
	if v, ok := h.opt.Holders.(Vetter); ok && v.Vet()(Socket{port.TCP, at}) {
		return nil, errTaken
	}
	return h.opt.Network.Listen(ctx, network(port.TCP, at), at.String())
}

// WhyNot explains why this program cannot listen at an address that flag names.
func WhyNot(err error, at netip.AddrPort, flag string) string {
	switch kindOf(err) {
	case inUse:
		return fmt.Sprintf("%s is in use by another program: stop that, or choose another %s", at, flag)
	case forbidden:
		return fmt.Sprintf("listen on %s: %s", at, forbiddenHint(at, "choose another "+flag))
	case noAddress:
		return fmt.Sprintf("%s is not an address of this host: choose another %s", at.Addr(), flag)
	}
	return err.Error()
}

// RetryMin and RetryMax bound the wait between attempts to listen.
const (
	RetryMin = retryFirst
	RetryMax = conflictMax
)
