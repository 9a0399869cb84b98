// SPDX-License-Identifier: Apache-2.0

// Package vtunnel is the sink for the two peers to which Rancher Desktop's own agent
// sends ports as JSON messages: the privileged service behind vtunnel (TCP), and
// wsl-proxy (unix).
//
// The peers send no answers and no lists. A message was processed when the peer
// closes its connection. The sink remembers what it sent, also in a file, and
// notices a restart by an idle connection that it holds open to the peer.
//
// Behind vtunnel are two programs: its end in the guest accepts all connections, and
// dies of one if Windows does not answer; its supervisor restarts it some ten times. So
// that peer is present only while a connection to it lasts, and is tried ever less often.
package vtunnel

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// DefaultURL is where wsl-proxy listens.
const DefaultURL = "unix:///run/wsl-proxy.sock"

// Options configures a Sink. Logger is required.
type Options struct {
	// URL is tcp://HOST:PORT for vtunnel or unix:///PATH for wsl-proxy;
	// DefaultURL if empty. Its parameters: interface=NAME, whose addresses
	// vtunnel's peer connects to ("eth0" if absent); guest=ADDRESS, what wsl-proxy
	// connects to ("192.168.143.1" if absent); and static=PORT/PROTOCOL, any number
	// of times, for what is always published on the host's 127.0.0.1.
	URL string
	// Bridges serve what the peer cannot connect to; nil for none. The sink closes
	// them at the end of Run.
	Bridges *peer.Bridges
	// Memory is the file that lists what the peer was sent; "" for none.
	Memory peer.Memory
	// Timeout bounds the wait until the peer has processed a message; 2 s if 0.
	Timeout time.Duration
	// Dial is a net.Dialer's if nil.
	Dial   func(ctx context.Context, network, address string) (net.Conn, error)
	Logger *slog.Logger

	farewell time.Duration // peer.Farewell if 0
	settle   time.Duration // settle if 0
}

// settle is how long a connection to vtunnel must last after another one had ended, to
// show that Windows answers: the guest's end takes 2 s to find that it does not.
const settle = 3 * time.Second

// Sink keeps the entries of one peer. It implements reconcile.Sink and peer.Peer.
type Sink struct {
	o                Options
	network, address string
	perPort          bool // wsl-proxy keeps one listener for each port
	iface            string
	upstream         netip.Addr
	static           []port.Slot
	text             string // the URL without parameters
	log              *slog.Logger
	wake             schedule.Signal

	mu     sync.Mutex
	up     bool
	reason port.Reason // why it is not up
	epoch  uint64      // how often it came up

	syncing sync.Mutex // held by Sync and at the end; guards what follows
	closed  bool
	seen    uint64 // epoch that have is of
	driver  *peer.Driver
	have    peer.Targets[string] // what the peer was sent since it came up, with the remote
	nets    []*net.IPNet         // of the interface
	connect []connectAddr
	look    atomic.Bool // the addresses of the interface may have changed
}

// New checks the options, reads the memory and starts nothing: see Run.
func New(o Options) (*Sink, error) {
	if o.Logger == nil {
		return nil, errors.New("vtunnel: a logger is required")
	}
	o.URL = cmp.Or(o.URL, DefaultURL)
	o.Timeout = cmp.Or(o.Timeout, 2*time.Second)
	o.farewell = cmp.Or(o.farewell, peer.Farewell)
	o.settle = cmp.Or(o.settle, settle)
	if o.Dial == nil {
		d := new(net.Dialer)
		d.SetMultipathTCP(false)
		o.Dial = d.DialContext
	}
	s := &Sink{
		o: o, wake: schedule.NewSignal(), reason: port.Because(port.NotConnected),
		have: make(peer.Targets[string]),
	}
	s.look.Store(true)
	if err := s.parse(o.URL); err != nil {
		return nil, fmt.Errorf("vtunnel: %q: %w", o.URL, err)
	}
	s.log = o.Logger.With("peer", s.text)
	s.driver = peer.NewDriver(o.Memory, o.Bridges, s.wake, s.log)
	return s, nil
}

// parse reads Options.URL.
func (s *Sink) parse(text string) error {
	u, err := url.Parse(text)
	if err != nil {
		return err
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return err
	}
	u.RawQuery = ""
	s.text = u.String()
	switch {
	case u.Scheme == "tcp" && u.Port() != "":
		s.network, s.address = "tcp", u.Host
	case u.Scheme == "unix" && strings.HasPrefix(u.Path, "/"):
		s.network, s.address, s.perPort = "unix", u.Path, true
	default:
		return errors.New("want tcp://HOST:PORT or unix:///PATH")
	}
	s.iface = cmp.Or(query.Get("interface"), "eth0")
	if s.upstream, err = netip.ParseAddr(cmp.Or(query.Get("guest"), "192.168.143.1")); err != nil || !s.upstream.Is4() {
		return fmt.Errorf("guest=%s: want an IPv4 address", query.Get("guest"))
	}
	for _, v := range query["static"] {
		number, protocol, _ := strings.Cut(v, "/")
		n, err := strconv.ParseUint(number, 10, 16)
		p, perr := port.ParseProtocol(protocol)
		if err != nil || n == 0 || perr != nil {
			return fmt.Errorf("static=%s: want PORT/tcp or PORT/udp", v)
		}
		if p == port.UDP && !s.perPort {
			return fmt.Errorf("static=%s: %s", v, port.Because(port.PeerLacksUDP))
		}
		s.static = append(s.static, port.Slot{Protocol: p, Port: uint16(n)})
	}
	for k := range query {
		if k != "interface" && k != "guest" && k != "static" {
			return fmt.Errorf("parameter %q: want interface, guest or static", k)
		}
	}
	return nil
}

// Name implements reconcile.Sink.
func (s *Sink) Name() string { return "vtunnel" }

// Wake implements reconcile.Sink.
func (s *Sink) Wake() <-chan struct{} { return s.wake }

// Run watches the peer until ctx ends, and then removes its entries.
func (s *Sink) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	if !s.perPort {
		wg.Go(func() {
			peer.WatchNetwork(ctx, s.log, func() {
				s.look.Store(true)
				s.wake.Notify()
			})
		})
	}
	s.hold(ctx)
	wg.Wait()
	s.leave(context.WithoutCancel(ctx))
	s.driver.Close()
	return ctx.Err()
}

// hold keeps a connection open, which shows whether the peer runs.
func (s *Sink) hold(ctx context.Context) {
	pace := peer.NewPace()
	if !s.perPort {
		pace = peer.NewCautiousPace()
	}
	for first := true; ctx.Err() == nil; {
		dctx, cancel := context.WithTimeout(ctx, peer.DialTimeout)
		conn, err := s.o.Dial(dctx, s.network, s.address)
		cancel()
		pace.Begin(err == nil)
		if err != nil {
			if ctx.Err() == nil {
				s.setDown(err)
			}
			pace.Down(ctx)
			continue
		}
		if s.perPort || first || lasts(ctx, conn, s.o.settle) {
			first = false
			s.setUp()
			err = awaitEnd(ctx, conn)
			s.log.Debug("peer closed the idle connection", "err", err)
		}
		_ = conn.Close()
		if ctx.Err() == nil && !s.perPort {
			s.setDown(errNoWindows)
		}
		if ctx.Err() == nil {
			pace.End(ctx)
		}
	}
}

var errNoWindows = errors.New("it closes connections: Windows may not answer it")

// lasts reports whether the peer leaves conn open for a time.
func lasts(ctx context.Context, conn net.Conn, d time.Duration) bool {
	limited, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	err := awaitEnd(limited, conn)
	return errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() == nil && conn.SetReadDeadline(time.Time{}) == nil
}

// awaitEnd waits for the peer to close conn, or for the end of ctx, and discards what
// it sends.
func awaitEnd(ctx context.Context, conn net.Conn) error {
	over := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)); close(over) })
	_, err := io.Copy(io.Discard, conn)
	if !stop() {
		<-over // the deadline is not set later than this
	}
	return err
}

func (s *Sink) setUp() {
	s.mu.Lock()
	was := s.up
	s.up, s.reason = true, port.Reason{}
	s.epoch++
	s.mu.Unlock()
	if !was {
		s.log.Info("peer found")
	}
	s.wake.Notify()
}

func (s *Sink) setDown(err error) {
	reason := port.Because(port.PeerDown, s.text, peer.Cause(err).Error())
	s.mu.Lock()
	changed := s.up || s.reason != reason
	s.up, s.reason = false, reason
	s.mu.Unlock()
	if changed {
		s.log.Warn("peer cannot be reached; retrying", "err", err)
		s.wake.Notify()
	}
}

func (s *Sink) presence() (up bool, reason port.Reason, epoch uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up, s.reason, s.epoch
}

// Sync implements reconcile.Sink. Without a peer all is pending, which is not an
// error: Wake notifies when there is one.
func (s *Sink) Sync(ctx context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	s.syncing.Lock()
	defer s.syncing.Unlock()
	if s.closed {
		return nil, nil
	}
	s.driver.Update(want, change)
	up, reason, epoch := s.presence()
	if !up {
		s.driver.KeepBridges()
		return s.driver.Pending(change, reason), nil
	}
	s.readAddresses()
	if s.driver.Present() || epoch != s.seen { // a new peer knows nothing
		s.seen = epoch
		clear(s.have)
		s.markAll()
	}
	err := s.driver.Apply(ctx, s)
	if err != nil { // all that was not answered is pending
		err = fmt.Errorf("%w: %w", reconcile.ErrPending, err)
	}
	return s.driver.Outcomes(), err
}

// markAll has everything compared with what the peer was sent.
func (s *Sink) markAll() {
	s.driver.MarkAll()
	for _, slot := range s.static {
		s.driver.Dirty()[slot] = struct{}{}
	}
}

// readAddresses reads where the peer is to connect to. When that changed,
// everything must be sent again.
func (s *Sink) readAddresses() {
	if s.perPort || !s.look.Swap(false) {
		return
	}
	nets, err := peer.InterfaceAddresses(s.iface)
	if err != nil {
		s.log.Warn("no address to connect to", "err", err)
	}
	connect := connectAddrs(nets)
	if slices.Equal(connect, s.connect) {
		return
	}
	if s.connect != nil {
		s.log.Info("interface addresses changed; sending all entries again", "interface", s.iface, "addresses", len(nets))
	}
	s.nets, s.connect = nets, connect
	s.markAll()
}

// send sends the peer one message and waits until it has processed it.
func (s *Sink) send(ctx context.Context, b []byte) error {
	up, reason, epoch := s.presence()
	if !up {
		return errors.New(reason.String())
	}
	dctx, cancel := context.WithTimeout(ctx, s.o.Timeout)
	defer cancel()
	conn, err := s.o.Dial(dctx, s.network, s.address)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel = peer.Through(ctx, s.o.Timeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := conn.Write(b); err != nil {
		return s.failed(ctx, err)
	}
	// The peer closes the connection when it is done. The next message must wait for
	// that, because the peers handle each connection on its own. Our side stays open:
	// vtunnel closes a connection in both directions as soon as one ends, and would
	// answer the end of ours at once.
	if _, err := io.Copy(io.Discard, conn); err != nil {
		return s.failed(ctx, err)
	}
	if up, _, now := s.presence(); !up || now != epoch {
		return fmt.Errorf("%s: the peer restarted meanwhile", s.text)
	}
	return nil
}

// failed returns what went wrong with a message.
func (s *Sink) failed(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("%s did not process a message within %v", s.text, s.o.Timeout)
	}
	return fmt.Errorf("%s: %w", s.text, peer.Cause(err))
}

// Reset resets the connections through bridges to publications that a rule forbids.
func (s *Sink) Reset(keys []port.Key) { s.driver.Reset(keys) }

// leave removes what the peer was sent.
func (s *Sink) leave(ctx context.Context) {
	s.syncing.Lock()
	defer s.syncing.Unlock()
	s.closed = true
	if up, _, _ := s.presence(); !up {
		return // a peer that does not run has no entries
	}
	ctx, cancel := context.WithTimeout(ctx, s.o.farewell)
	defer cancel()
	s.driver.Leave(ctx, s)
}
