// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
)

const (
	openTimeout  = 5 * time.Second  // for a stream and the request on it
	replyTimeout = 30 * time.Second // for the guest to try all its dial targets
	receivePause = time.Second      // at most, after a datagram could not be received

	// udpConnections is how many UDP flows of one guest have connections of their
	// own. They are kept until they are idle, which is long after a single datagram.
	udpConnections = 1024
)

// flows is the traffic of one guest.
type flows struct {
	*forward.Book

	mu      sync.Mutex
	session link.Session  // nil while there is none
	moved   chan struct{} // closed and replaced when session changes
}

func newFlows(limit int) *flows {
	return &flows{Book: forward.NewBook(limit), moved: make(chan struct{})}
}

var (
	errNoLink    = errors.New("no link to the guest")
	errDenied    = errors.New("denied by the host's rules")
	errPending   = errors.New("not decided by the host's rules yet")
	errWithdrawn = errors.New("not published any more")
	errHidden    = errors.New("not open to other machines any more")
)

// FlowError is the answer of a guest that did not open a flow.
type FlowError struct{ wire.FlowReply }

// Error implements error.
func (e *FlowError) Error() string { return fmt.Sprintf("guest: %s: %s", e.Status, e.Reason) }

// use sets the session, nil for none.
func (f *flows) use(s link.Session) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.session = s
	close(f.moved)
	f.moved = make(chan struct{})
}

// await returns the session, waiting up to hold for one.
func (f *flows) await(ctx context.Context, hold time.Duration) (link.Session, error) {
	var timer *time.Timer // most callers find a session at once
	for {
		f.mu.Lock()
		session, moved := f.session, f.moved
		f.mu.Unlock()
		if session != nil {
			select {
			case <-session.Done(): // moved will follow
			default:
				return session, nil
			}
		}
		if timer == nil {
			timer = time.NewTimer(hold)
			defer timer.Stop()
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-timer.C:
			return nil, errNoLink
		case <-moved:
		}
	}
}

// session returns the session for a flow, waiting up to hold for one and up to hold again
// until the guest reports a publication that is kept.
func (t *target) session(ctx context.Context, hold time.Duration) (link.Session, error) {
	session, err := t.guest.flows.await(ctx, hold)
	released := t.kept.Load()
	if err != nil || released == nil {
		return session, err
	}
	timer := time.NewTimer(hold)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-*released:
	}
	return t.guest.flows.await(ctx, hold) // there may be another session now
}

// stream opens a flow to a target, of a client that connected to an address
// of the host, which is for servers that are told. The guest has accepted it.
func (h *Host) stream(ctx context.Context, c *target, peer, at netip.AddrPort) (link.Stream, error) {
	session, err := c.session(ctx, h.opt.Hold)
	if err != nil {
		h.stats.unlinked.Add(1)
		return nil, err
	}
	if err := h.mayGoOn(c, false); err != nil { // what was published may be another server's by now
		h.stats.refused.Add(1)
		return nil, err
	}
	octx, cancel := context.WithTimeout(ctx, openTimeout)
	open := session.Connect
	if c.key.Protocol == port.UDP && c.guest.flows.Open(port.UDP) > udpConnections {
		open = session.Open
	}
	stream, err := open(octx)
	cancel()
	if err != nil {
		h.stats.unlinked.Add(1)
		return nil, fmt.Errorf("open a flow: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = stream.Reset() })
	reply, err := ask(stream, wire.FlowRequest{Key: c.key, Peer: peer, At: at})
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = stream.Reset()
		h.stats.unlinked.Add(1)
		return nil, err
	}
	if reply.Status != wire.FlowOK {
		_ = stream.Close()
		h.stats.refused.Add(1)
		return nil, &FlowError{reply}
	}
	if err := h.mayGoOn(c, true); err != nil {
		_ = stream.Reset()
		h.stats.refused.Add(1)
		return nil, err
	}
	h.stats.ok.Add(1)
	return stream, nil
}

// mayGoOn returns why a flow that was begun for a claim may not go on by what is known of the
// port and its owner now. Once the guest has accepted a flow, it outlives its publication.
func (h *Host) mayGoOn(c *target, accepted bool) error {
	if !c.gone.Load() {
		return nil // a denial that follows finds the flow in the book
	}
	g := c.guest.lock()
	defer g.unlock()
	switch pub := g.pubs[c.key]; {
	case pub == nil && !accepted:
		return errWithdrawn
	case pub != nil && !c.isOf(pub.fact.Demands()):
		return errWithdrawn // the address is another container's by now
	case pub != nil && pub.denied != nil && pub.denied.State == port.Pending:
		return fmt.Errorf("%w: %s", errPending, pub.denied.Reason)
	case pub != nil && pub.denied != nil:
		return errDenied
	}
	return nil
}

// ask sends the request of a flow and reads the reply.
func ask(stream link.Stream, req wire.FlowRequest) (wire.FlowReply, error) {
	_ = stream.SetDeadline(time.Now().Add(openTimeout))
	if err := wire.WriteRequest(stream, req); err != nil {
		return wire.FlowReply{}, fmt.Errorf("flow request: %w", err)
	}
	_ = stream.SetDeadline(time.Now().Add(replyTimeout))
	reply, err := wire.ReadReply(stream)
	if err != nil {
		return wire.FlowReply{}, err
	}
	return reply, stream.SetDeadline(time.Time{})
}

// trace begins to trace a flow; nil if nobody wants that.
func (h *Host) trace(c *target, peer netip.AddrPort) *trace.Flow {
	return h.opt.Trace.Begin(trace.Subject{Key: c.key, HostPort: c.addr.Port(), Guest: c.guest.name, Peer: peer})
}

// outside marks the flow of a connection of another machine to a target, and reports whether
// it may go on: what was reset when the address was closed did not have this one.
func (d *door) outside(c *target, f *forward.Flow) bool {
	g := c.guest.lock()
	defer g.unlock()
	if d.closed.Load() || c.gone.Load() {
		return false
	}
	f.Outside(!g.pubs[c.key].exposed.IsZero())
	return true
}

// carry starts the flow of one connection.
func (d *door) carry(ctx context.Context, conn net.Conn) {
	forward.Abortive(conn)
	h, c := d.h, d.to.Load()
	g := c.guest
	ctx, f := g.flows.Begin(ctx, c.key)
	if f == nil {
		h.stats.overLimit.Add(1)
		forward.Reset(conn)
		return
	}
	at := addrOf(conn.LocalAddr(), d.addr)
	if !at.Addr().IsLoopback() && !d.outside(c, f) {
		f.End()
		forward.Reset(conn)
		return
	}
	h.stats.tcp.Add(1)
	h.wg.Go(func() {
		defer h.stats.tcp.Add(-1)
		defer f.End()
		peer := addrOf(conn.RemoteAddr(), netip.AddrPort{})
		flow := h.trace(c, peer)
		stream, err := h.stream(ctx, c, peer, at)
		if err != nil {
			forward.Reset(conn)
		} else {
			err = forward.Splice(trace.With(ctx, flow), conn, stream, &h.meter)
		}
		flow.End(err)
		if err != nil && ctx.Err() == nil {
			g.log.Debug("flow ended", "publication", c.key, "peer", peer, "err", err)
		}
	})
}
