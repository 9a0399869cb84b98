// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// maxFlows bounds the connections through all bridges at one time.
const maxFlows = 10_240

// BridgeOptions configures Bridges. All are required.
type BridgeOptions struct {
	// Listen is net.Listen with a socket that is known as our own before it is
	// bound (own.Sockets).
	Listen func(ctx context.Context, network, address string) (net.Listener, error)
	// Serve carries a connection to what serves pub, owns it, and has closed or
	// reset it when it returns. The end of ctx cuts it.
	Serve  func(ctx context.Context, conn net.Conn, pub port.Publication) error
	Logger *slog.Logger
}

// Bridges are listeners on the one address of the guest that a peer connects to,
// for publications that are served elsewhere: on the guest's loopback, on
// another address, or on IPv6 alone. They take connections from the network of
// that address only, so that what listens on the loopback is opened to the peer
// and not to containers. TCP alone is bridged.
type Bridges struct {
	o      BridgeOptions
	ctx    context.Context //nolint:containedctx // of all flows, which outlive the Sync that opened their bridge
	cancel context.CancelFunc
	busy   atomic.Int64
	wg     sync.WaitGroup // accept loops and flows

	mu     sync.Mutex
	closed bool
	open   map[port.Key]*bridge
}

type bridge struct {
	l      net.Listener
	pub    atomic.Pointer[port.Publication]
	from   netip.Prefix
	ctx    context.Context //nolint:containedctx // of its flows, as that of Bridges
	cancel context.CancelFunc
	flows  sync.WaitGroup
}

// NewBridges returns none. The caller must Close them.
func NewBridges(o BridgeOptions) *Bridges {
	b := &Bridges{o: o, open: make(map[port.Key]*bridge)}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b
}

// Open makes sure that p is served at a port of the address of at, port 0 for
// any, and returns where. Connections are taken from the network of at.
func (b *Bridges) Open(ctx context.Context, p port.Publication, at netip.Prefix, number uint16) (netip.AddrPort, error) {
	if p.Protocol != port.TCP {
		return netip.AddrPort{}, errors.New("only TCP is bridged")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return netip.AddrPort{}, net.ErrClosed
	}
	if old := b.open[p.Key]; old != nil {
		where := addrOf(old.l)
		if where.Addr() == at.Addr() && old.from == at.Masked() && (number == 0 || number == where.Port()) {
			old.pub.Store(&p)
			return where, nil
		}
		b.drop(p.Key)
	}
	l, err := b.o.Listen(ctx, "tcp", netip.AddrPortFrom(at.Addr(), number).String())
	if err != nil {
		return netip.AddrPort{}, Cause(err)
	}
	br := &bridge{l: l, from: at.Masked()}
	br.ctx, br.cancel = context.WithCancel(b.ctx)
	br.pub.Store(&p)
	b.open[p.Key] = br
	b.wg.Go(func() { b.accept(br) })
	return addrOf(l), nil
}

func addrOf(l net.Listener) netip.AddrPort {
	a, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a.AddrPort().Addr().Unmap(), a.AddrPort().Port())
}

// Keep closes the bridges that are no longer needed. Their connections go on.
func (b *Bridges) Keep(needed func(port.Key) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := range b.open {
		if !needed(k) {
			b.drop(k)
		}
	}
}

func (b *Bridges) drop(k port.Key) {
	if br := b.open[k]; br != nil {
		_ = br.l.Close()
		delete(b.open, k)
	}
}

// Cut closes the bridges of publications that are forbidden now, with their
// connections.
func (b *Bridges) Cut(keys []port.Key) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, k := range keys {
		if br := b.open[k]; br != nil {
			br.cancel()
			b.drop(k)
		}
	}
}

// Close ends all bridges and their connections, and returns when they have ended.
func (b *Bridges) Close() {
	b.mu.Lock()
	b.closed = true
	b.cancel()
	for k := range b.open {
		b.drop(k)
	}
	b.mu.Unlock()
	b.wg.Wait()
}

func (b *Bridges) accept(br *bridge) {
	defer func() {
		br.flows.Wait()
		br.cancel()
	}()
	for {
		conn, err := br.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // want of descriptors or memory; the listener stays good
			Sleep(br.ctx, 10*time.Millisecond)
			continue
		}
		if why := b.refuse(br, conn); why != "" {
			b.o.Logger.Debug("connection refused", "publication", br.pub.Load().Key, "from", conn.RemoteAddr(), "why", why)
			_ = conn.Close()
			continue
		}
		b.busy.Add(1)
		br.flows.Go(func() {
			defer b.busy.Add(-1)
			_ = b.o.Serve(br.ctx, conn, *br.pub.Load()) // it logs
		})
	}
}

func (b *Bridges) refuse(br *bridge, conn net.Conn) string {
	a, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return "it has no address"
	}
	from := a.AddrPort().Addr().Unmap()
	switch {
	case !br.from.Contains(from) || from == addrOf(br.l).Addr():
		return fmt.Sprintf("it does not come from %s", br.from)
	case b.busy.Load() >= maxFlows:
		return "too many connections"
	}
	return ""
}
