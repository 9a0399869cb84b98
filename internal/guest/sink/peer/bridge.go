// SPDX-License-Identifier: Apache-2.0

package peer

import (
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

	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// maxFlows bounds the connections through all bridges at one time.
const maxFlows = 10_240

// BridgeOptions configures Bridges. All but Loopback are required.
type BridgeOptions struct {
	// Listen is net.Listen with a socket that is known as our own before it is
	// bound (own.Sockets).
	Listen func(ctx context.Context, network, address string) (net.Listener, error)
	// ListenPacket is the same for UDP.
	ListenPacket func(ctx context.Context, network, address string) (*own.UDPConn, error)
	// Serve carries a connection to what serves pub, owns it, and has closed or
	// reset it when it returns. The end of ctx cuts it.
	Serve func(ctx context.Context, conn net.Conn, pub port.Publication) error
	// ServeUDP is the same for the datagrams of one client.
	ServeUDP func(ctx context.Context, client forward.Datagrams, req forward.Request) error
	// Loopback has publications of the guest's loopback bridged, too. Not required.
	Loopback bool
	Logger   *slog.Logger
}

// Bridges are listeners on the one address of the guest that a peer connects to,
// for publications that are served elsewhere: on the guest's loopback, on
// another address, or on IPv6 alone. They take connections from the peer only, so
// that these are opened to neither containers nor other machines.
type Bridges struct {
	o        BridgeOptions
	ctx      context.Context //nolint:containedctx // of all flows, which outlive the Sync that opened their bridge
	cancel   context.CancelFunc
	flows    *forward.Book
	acceptor *own.Acceptor
	wg       sync.WaitGroup // accept loops and flows

	mu     sync.Mutex
	closed bool
	open   map[use]*bridge
	broken map[port.Slot]struct{} // of bridges that failed, until takeBroken
	wake   schedule.Signal        // notified of them; nil for none
}

// use is what a bridge is for: a publication at one host port, over one family.
type use struct {
	slot port.Slot
	key  port.Key
	is4  bool
}

var errForbidden = errors.New("the port is no longer allowed")

type bridge struct {
	use  use
	l    io.Closer
	addr netip.AddrPort
	pub  atomic.Pointer[port.Publication]
	from netip.Prefix
}

// NewBridges returns none. The caller must Close them.
func NewBridges(o BridgeOptions) *Bridges {
	b := &Bridges{o: o, acceptor: own.NewAcceptor(o.Logger, own.ForFlow), flows: forward.NewBook(maxFlows), open: make(map[use]*bridge), broken: make(map[port.Slot]struct{})}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b
}

// Side is the guest's side of a peer's connections.
type Side struct {
	At   netip.Addr   // the address of the guest that the peer connects to
	From netip.Prefix // from where it does
}

// From returns the prefix of one address.
func From(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// Open makes sure that p is served for slot at a port of side, 0 for any, and returns
// where.
func (b *Bridges) Open(ctx context.Context, slot port.Slot, p port.Publication, side Side, number uint16) (netip.AddrPort, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return netip.AddrPort{}, net.ErrClosed
	}
	u := use{slot, p.Key, side.At.Is4()}
	if old := b.open[u]; old != nil {
		if old.addr.Addr() == side.At && old.from == side.From.Masked() && (number == 0 || number == old.addr.Port()) {
			old.pub.Store(&p)
			return old.addr, nil
		}
		b.drop(u)
	}
	br := &bridge{use: u, from: side.From.Masked()}
	br.pub.Store(&p)
	if err := b.listen(ctx, br, netip.AddrPortFrom(side.At, number), p.Protocol); err != nil {
		return netip.AddrPort{}, Cause(err)
	}
	b.open[u] = br
	return br.addr, nil
}

func (b *Bridges) listen(ctx context.Context, br *bridge, at netip.AddrPort, protocol port.Protocol) error {
	if protocol == port.UDP {
		pc, err := b.o.ListenPacket(ctx, "udp", at.String())
		if err != nil {
			return err
		}
		clients := forward.NewClients(pc, func(from netip.AddrPort) (func(forward.Datagrams), *forward.Flow) { return b.client(br, from) })
		br.l, br.addr = clients, boundTo(pc.LocalAddr())
		b.wg.Go(func() { clients.Run(b.ctx) })
		return nil
	}
	l, err := b.o.Listen(ctx, "tcp", at.String())
	if err != nil {
		return err
	}
	br.l, br.addr = l, boundTo(l.Addr())
	b.wg.Go(func() { b.accept(br, l) })
	return nil
}

func boundTo(a net.Addr) netip.AddrPort {
	v, ok := a.(interface{ AddrPort() netip.AddrPort })
	if !ok {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(v.AddrPort().Addr().Unmap(), v.AddrPort().Port())
}

// Keep closes the bridges that are no longer needed. Their connections go on.
func (b *Bridges) Keep(needed func(slot port.Slot, k port.Key, is4 bool) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for u := range b.open {
		if !needed(u.slot, u.key, u.is4) {
			b.drop(u)
		}
	}
}

func (b *Bridges) drop(u use) {
	_ = b.open[u].l.Close()
	delete(b.open, u)
}

// Reset closes the bridges of publications that are forbidden now, and resets their
// connections.
func (b *Bridges) Reset(keys []port.Key) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for u := range b.open {
		if slices.Contains(keys, u.key) {
			b.drop(u)
		}
	}
	b.flows.Reset(errForbidden, keys...)
}

// Close ends all bridges and their connections, and returns when they have ended.
func (b *Bridges) Close() {
	b.mu.Lock()
	b.closed = true
	b.cancel()
	for u := range b.open {
		b.drop(u)
	}
	b.mu.Unlock()
	b.wg.Wait()
}

func (b *Bridges) accept(br *bridge, l net.Listener) {
	err := b.acceptor.Serve(b.ctx, l, func(conn net.Conn) {
		ctx, f := b.begin(br, boundTo(conn.RemoteAddr()))
		if f == nil {
			forward.Reset(conn)
			return
		}
		b.wg.Go(func() {
			defer f.End()
			_ = b.o.Serve(ctx, conn, *br.pub.Load()) // it logs
		})
	})
	if err != nil {
		b.failed(br, err)
	}
}

// notify has wake notified when a bridge fails.
func (b *Bridges) notify(wake schedule.Signal) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.wake = wake
}

// takeBroken returns the slots of bridges that failed since the last call.
func (b *Bridges) takeBroken() map[port.Slot]struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.broken
	b.broken = make(map[port.Slot]struct{})
	return out
}

// failed closes a bridge that can accept no more, and asks for another one.
func (b *Bridges) failed(br *bridge, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.o.Logger.Warn("bridge failed", "publication", br.use.key, "err", err)
	if b.open[br.use] == br {
		b.drop(br.use)
		b.broken[br.use.slot] = struct{}{}
		b.wake.Notify()
	}
}

// client begins the flow of a UDP client.
func (b *Bridges) client(br *bridge, from netip.AddrPort) (func(forward.Datagrams), *forward.Flow) {
	ctx, f := b.begin(br, from)
	return func(client forward.Datagrams) {
		defer f.End()
		_ = b.o.ServeUDP(ctx, client, forward.Request{Publication: *br.pub.Load(), Peer: from}) // it logs
	}, f
}

// begin enters a flow, nil if it is refused.
func (b *Bridges) begin(br *bridge, from netip.AddrPort) (context.Context, *forward.Flow) {
	k := br.pub.Load().Key
	why := fmt.Sprintf("it does not come from %s", br.from)
	if br.from.Contains(from.Addr()) && from.Addr() != br.addr.Addr() {
		ctx, f := b.flows.Begin(b.ctx, k)
		if f != nil {
			return ctx, f
		}
		why = "too many connections"
	}
	b.o.Logger.Debug("connection refused", "publication", k, "from", from, "why", why)
	return nil, nil
}
