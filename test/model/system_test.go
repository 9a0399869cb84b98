// SPDX-License-Identifier: Apache-2.0

package model

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/sink/hostlink"
	"github.com/fairlead/fairlead/internal/guest/sink/listener"
	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
)

// system is what is tested: all from the feeds of the sources to the listeners of the
// host, joined as the agent and the host join them.
type system struct {
	*core
	reconciler *reconcile.Reconciler
	flaky      *flaky
	peer       *peerSink
	guest      *network // of the listener sink
	link       *links
	host       *host.Host
	network    *network // of the host
}

// core is the registry with what reports to it.
type core struct {
	registry *registry.Registry
	feeds    map[string]registry.Feed
	facts    map[string]*facts
	clock    *clock
}

func newCore(rules *rules.Set, clock *clock) *core {
	c := &core{
		registry: registry.New(registry.Options{Rules: rules, Logger: slog.New(slog.DiscardHandler), Now: clock.now}),
		feeds:    map[string]registry.Feed{}, facts: map[string]*facts{}, clock: clock,
	}
	for _, e := range engines {
		c.facts[e] = &facts{how: answerAfter, owners: map[string]port.Owner{}, stopped: map[string]port.Owner{}}
		c.registry.AddFacts(e, c.facts[e])
	}
	for _, name := range sources {
		c.feeds[name] = c.registry.Feed(name)
	}
	return c
}

// start runs a system until ctx ends. ended is to be waited for after that.
func start(ctx context.Context, t *testing.T) (s *system, ended *sync.WaitGroup) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	s = &system{
		core: newCore(agentRules[0].compile(t), new(clock)), guest: newNetwork(), network: newNetwork(),
		flaky: &flaky{held: map[port.Key]port.Publication{}, wake: make(chan struct{}, 1)},
		peer:  newPeerSink(log),
	}
	s.link = newLinks(t)
	serve := func(context.Context, net.Conn, forward.Request) error { return errors.ErrUnsupported }
	hl, err := hostlink.New(s.link, hostlink.Options{
		Logger: log, Serve: serve,
		ServeUDP: func(context.Context, forward.Datagrams, forward.Request) error { return errors.ErrUnsupported },
		Lookup:   func(k port.Key) (port.Publication, bool) { return s.reconciler.Wanted().View().Get(k) },
	})
	must(t, err)
	ls, err := listener.New(listener.Options{
		Network: s.guest, Sockets: s.registry.At, Logger: log,
		Serve:    func(context.Context, net.Conn, port.Publication) error { return errors.ErrUnsupported },
		ServeUDP: func(context.Context, forward.Datagrams, forward.Request) error { return errors.ErrUnsupported },
	})
	must(t, err)
	s.reconciler = reconcile.New(s.registry.Publications(), []reconcile.Sink{s.flaky, s.peer, ls}, reconcile.Options{
		HoldDown: holdDown, Ready: s.registry.Ready(), Follower: hl, Logger: log,
	})
	s.host, err = host.New(host.Options{
		Guests: []host.Guest{{Name: "g", Dial: s.link.dial}}, Network: s.network, Holders: nobody{}, Policy: hostRules[0].compile(t),
		Grace: grace,
	})
	must(t, err)
	ended = new(sync.WaitGroup)
	for _, run := range []func(context.Context) error{s.registry.Run, s.reconciler.Run, hl.Run, ls.Run, s.host.Run} {
		ended.Go(func() { _ = run(ctx) })
	}
	return s, ended
}

const (
	holdDown = 150 * time.Millisecond
	grace    = 10 * time.Second
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// facts are what an engine knows.
type facts struct {
	mu      sync.Mutex
	owners  map[string]port.Owner
	stopped map[string]port.Owner
	notify  func([]registry.AttributionKey)

	how      int         // it answers when it is asked for a list: below
	held     []func()    // answers that wait until how is set again
	waiting  int         // requests without an answer
	lists    []time.Time // when those that were answered were asked for
	declined bool        // it said that it is not asked for lists
}

// How an engine answers, or after one of answerTimes.
const (
	answerNever = iota // until this is set again
	answerDecline
	answerAfter
)

// setHow sets how the engine answers from now on, and gives the answers that were held.
func (f *facts) setHow(how int) {
	f.mu.Lock()
	held := f.held
	f.how, f.held = how, nil
	f.mu.Unlock()
	for _, answer := range held {
		answer()
	}
}

// Confirm implements registry.Confirmer.
func (f *facts) Confirm(listed func()) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.how == answerDecline {
		f.declined = true
		return false
	}
	asked := time.Now()
	f.waiting++
	answer := func() {
		f.mu.Lock()
		f.lists = append(f.lists, asked)
		f.waiting--
		f.mu.Unlock()
		listed()
	}
	if f.how == answerNever {
		f.held = append(f.held, answer)
	} else {
		time.AfterFunc(answerTimes[f.how-answerAfter], answer)
	}
	return true
}

// lost forgets what was answered, as an engine was lost.
func (f *facts) lost() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists, f.declined = nil, false
}

// answered returns how many lists were answered that were asked for from a time on, and
// whether the engine is not asked.
func (f *facts) answered(from time.Time) (lists int, declined bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, asked := range f.lists {
		if !asked.Before(from) {
			lists++
		}
	}
	return lists, f.declined
}

func (f *facts) asked() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.waiting > 0
}

func (f *facts) get(key string) (port.Owner, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	o, ok := f.owners[key]
	return o, ok
}

func (f *facts) ByCgroup(uint64) (port.Owner, bool)            { return port.Owner{}, false }
func (f *facts) ByCgroupPath(path string) (port.Owner, bool)   { return f.get(path) }
func (f *facts) ByAddress(a netip.Addr) (port.Owner, bool)     { return f.get(a.String()) }
func (f *facts) Notify(notify func([]registry.AttributionKey)) { f.notify = notify }

func (f *facts) StoppedAt(a netip.Addr) (port.Owner, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	o, ok := f.stopped[a.String()]
	return o, ok
}

// set names the owner of a key, or with nil that it stopped.
func (f *facts) set(key string, o *port.Owner) {
	f.mu.Lock()
	if old, ok := f.owners[key]; o == nil && ok {
		f.stopped[key] = old
	}
	if delete(f.owners, key); o != nil {
		f.owners[key] = *o
		delete(f.stopped, key)
	}
	f.mu.Unlock()
	k := registry.AttributionKey{Path: key}
	if a, err := netip.ParseAddr(key); err == nil {
		k = registry.AttributionKey{Address: a}
	}
	f.notify([]registry.AttributionKey{k})
}

// flaky is a sink that fails as it is told to, and applies only what the hint names.
type flaky struct {
	mu   sync.Mutex
	held map[port.Key]port.Publication
	fail int // how: 0 not
	wake chan struct{}
}

func (f *flaky) Name() string          { return "flaky" }
func (f *flaky) Wake() <-chan struct{} { return f.wake }

func (f *flaky) set(fail int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

func (f *flaky) Sync(ctx context.Context, want reconcile.View, c reconcile.Change) (port.Outcomes, error) {
	f.mu.Lock()
	fail := f.fail
	f.mu.Unlock()
	switch fail {
	case 1:
		return nil, errors.New("failed")
	case 2: // hangs
		<-ctx.Done()
		return nil, ctx.Err()
	case 3:
		panic("failed")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	out := port.Outcomes{}
	for i, k := range c.Keys {
		if fail == 4 && i == len(c.Keys)/2 {
			return out, errors.New("failed half-way")
		}
		p, ok := want.Get(k)
		if !ok {
			delete(f.held, k)
			continue
		}
		f.held[k] = p
		out[k] = []port.Outcome{{State: port.Active, HostAddress: k.AddrPort()}}
	}
	return out, nil
}

func (f *flaky) now() map[port.Key]port.Publication {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.held)
}

// links join host and agent by pipes.
type links struct {
	token    link.Token
	accepted chan link.Session

	mu   sync.Mutex
	down bool
	gate chan struct{} // closed while bytes move
	cur  []*gated
}

func newLinks(t *testing.T) *links {
	t.Helper()
	token, err := link.NewToken(strings.Repeat("k", 32))
	must(t, err)
	l := &links{token: token, accepted: make(chan link.Session), gate: make(chan struct{})}
	close(l.gate)
	return l
}

func (l *links) Accept(ctx context.Context) (link.Session, error) {
	select {
	case s := <-l.accepted:
		return s, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// dial is the host's.
func (l *links) dial(ctx context.Context) (link.Session, error) {
	l.mu.Lock()
	down := l.down
	l.mu.Unlock()
	if down {
		return nil, errors.New("link down")
	}
	o := link.Options{Identity: "g", Token: l.token, Logger: slog.New(slog.DiscardHandler), HandshakeTimeout: 10 * time.Second}
	near, far := net.Pipe()
	g1, g2 := newGated(near, l), newGated(far, l)
	l.mu.Lock()
	l.cur = []*gated{g1, g2}
	l.mu.Unlock()
	type result struct {
		s   link.Session
		err error
	}
	other := make(chan result, 1)
	agent := o
	agent.Role = link.RoleAgent
	go func() {
		s, err := link.Server(ctx, g2, agent)
		other <- result{s, err}
	}()
	o.Role = link.RoleHost
	s, err := link.Client(ctx, g1, o)
	r := <-other
	if err := errors.Join(err, r.err); err != nil {
		return nil, err
	}
	select {
	case l.accepted <- r.s:
		return s, nil
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), s.Close(), r.s.Close())
	}
}

// set changes the link: down refuses new sessions, lose resets the current one.
func (l *links) set(down, lose bool) {
	l.mu.Lock()
	l.down = down
	cur := l.cur
	l.mu.Unlock()
	if lose {
		for _, s := range cur {
			_ = s.cut()
		}
	}
}

func (l *links) stall(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.gate:
		if on {
			l.gate = make(chan struct{})
		}
	default:
		if !on {
			close(l.gate)
		}
	}
}

// gated is a connection whose bytes move only while the gate is open. Like a socket it
// takes what is written meanwhile.
type gated struct {
	net.Conn
	l     *links
	queue chan []byte // what a socket holds
	once  sync.Once
	done  chan struct{} // closed: what is queued is the last
}

func newGated(c net.Conn, l *links) *gated {
	g := &gated{Conn: c, l: l, queue: make(chan []byte, 4096), done: make(chan struct{})}
	go g.pump()
	return g
}

// pump moves what was written, and closes the connection after the last.
func (g *gated) pump() {
	defer func() { _ = g.Conn.Close() }()
	for {
		select {
		case b := <-g.queue:
			if !g.pass(b) {
				return
			}
		case <-g.done:
			for len(g.queue) > 0 {
				if !g.pass(<-g.queue) {
					return
				}
			}
			return
		}
	}
}

// pass moves bytes when the gate is open. At the end it does not wait for that.
func (g *gated) pass(b []byte) bool {
	g.l.mu.Lock()
	gate := g.l.gate
	g.l.mu.Unlock()
	select {
	case <-gate:
	case <-g.done:
		select {
		case <-gate:
		default:
			return false
		}
	}
	_, err := g.Conn.Write(b)
	return err == nil
}

func (g *gated) SetWriteDeadline(time.Time) error { return nil } // writes never wait
func (g *gated) SetDeadline(t time.Time) error    { return g.SetReadDeadline(t) }

func (g *gated) Write(b []byte) (int, error) {
	select {
	case <-g.done:
		return 0, net.ErrClosed
	default:
	}
	select {
	case g.queue <- bytes.Clone(b):
		return len(b), nil
	default:
		return 0, os.ErrDeadlineExceeded
	}
}

// Close sends what was written before, if the gate is open.
func (g *gated) Close() error {
	g.once.Do(func() { close(g.done) })
	return g.SetReadDeadline(time.Unix(1, 0))
}

// cut closes the connection at once.
func (g *gated) cut() error { return errors.Join(g.Conn.Close(), g.Close()) }

// nobody finds no holders.
type nobody struct{}

func (nobody) Holders(context.Context, []host.Socket) (map[host.Socket]host.Holder, error) {
	return nil, nil //nolint:nilnil // nobody is known
}

// network opens listeners that get nothing: of TCP in memory, because sockets would stop
// fake time.
type network struct {
	mu    sync.Mutex
	taken map[address]bool        // by others
	open  map[address]func() bool // reports whether it is not closed
}

// address is one that somebody listens at.
type address struct {
	protocol port.Protocol
	netip.AddrPort
}

func (a address) String() string { return fmt.Sprintf("%s %s", a.protocol, a.AddrPort) }

func newNetwork() *network {
	return &network{taken: map[address]bool{}, open: map[address]func() bool{}}
}

func overlap(a, b netip.AddrPort) bool {
	return a.Port() == b.Port() && a.Addr().Is4() == b.Addr().Is4() && (a.Addr() == b.Addr() || a.Addr().IsUnspecified() || b.Addr().IsUnspecified())
}

// tidy forgets what is closed, and reports whether an address is free of ours. mu is held.
func (n *network) tidy(a address) (free bool) {
	maps.DeleteFunc(n.open, func(_ address, open func() bool) bool { return !open() })
	for b := range n.open {
		if a.protocol == b.protocol && overlap(a.AddrPort, b.AddrPort) {
			return false
		}
	}
	return true
}

// enter notes a listener, unless somebody has its address. mu is held.
func (n *network) enter(a address, open func() bool) error {
	free := n.tidy(a)
	for b := range n.taken {
		free = free && (a.protocol != b.protocol || !overlap(a.AddrPort, b.AddrPort))
	}
	if !free {
		return &net.OpError{Op: "listen", Net: a.protocol.String(), Err: syscall.EADDRINUSE}
	}
	n.open[a] = open
	return nil
}

func (n *network) Listen(_ context.Context, _, at string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := &ear{at: netip.MustParseAddrPort(at), done: make(chan struct{})}
	if err := n.enter(address{port.TCP, e.at}, e.open); err != nil {
		return nil, err
	}
	return e, nil
}

func (n *network) ListenExclusive(ctx context.Context, name, at string) (net.Listener, error) {
	return n.Listen(ctx, name, at)
}

// ListenPacket returns a socket that is shut already, so that nobody waits for a datagram.
// It remains in a set of its own until it is closed by who asked for it.
func (n *network) ListenPacket(ctx context.Context, _, at string) (*own.UDPConn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var set own.Sockets
	var bound netip.AddrPort
	a := address{port.UDP, netip.MustParseAddrPort(at)}
	if err := n.enter(a, func() bool { return set.Serves(port.UDP, bound) }); err != nil {
		return nil, err
	}
	c, err := set.ListenPacket(ctx, "udp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	bound = c.LocalAddr().(*net.UDPAddr).AddrPort()
	return c, c.UDPConn.Close()
}

func (n *network) take(a address) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.tidy(a) {
		n.taken[a] = true
	}
}

func (n *network) free() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.taken)
}

// now returns what is open, and whether somebody else has taken an address.
func (n *network) now() (open map[address]bool, taken bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tidy(address{})
	open = map[address]bool{}
	for a := range n.open {
		open[a] = true
	}
	return open, len(n.taken) > 0
}

// ear is a listener in memory, to which nobody connects.
type ear struct {
	at   netip.AddrPort
	done chan struct{}
}

func (e *ear) Accept() (net.Conn, error) {
	<-e.done
	return nil, net.ErrClosed
}

func (e *ear) Close() error {
	close(e.done)
	return nil
}

func (e *ear) open() bool {
	select {
	case <-e.done:
		return false
	default:
		return true
	}
}

func (e *ear) Addr() net.Addr { return net.TCPAddrFromAddrPort(e.at) }
