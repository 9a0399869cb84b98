// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/replica"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/probe"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestMain(m *testing.M) { leak.Main(m) }

// patience is a limit that is reached only if the test fails.
var patience = wait.Limit()

var (
	any4 = netip.IPv4Unspecified()
	lo4  = netip.MustParseAddr("127.0.0.1")
	lo6  = netip.IPv6Loopback()
	any6 = netip.IPv6Unspecified()
	lan  = netip.MustParseAddr("10.1.2.3")
)

func key(p port.Protocol, a netip.Addr, n uint16) port.Key {
	return port.Key{Protocol: p, Address: a, Port: n}
}

// pub returns a publication that asks for hosts, or without any for the loopback with
// its own port.
func pub(k port.Key, hosts ...netip.AddrPort) port.Fact {
	if len(hosts) == 0 {
		hosts = []netip.AddrPort{netip.AddrPortFrom(port.Loopback(k.Address), k.Port)}
	}
	return port.Fact{Key: k, Source: "socket", Decision: port.Decision{Allow: true, Host: hosts}}
}

func at(a netip.Addr, n uint16) netip.AddrPort { return netip.AddrPortFrom(a, n) }

// agent is a guest that sends what the test wants.
type agent struct {
	t      *testing.T
	name   string
	server *forward.Server

	mu       sync.Mutex
	down     error  // what Dial says
	hello    string // the name that it sends
	life     int    // of its process
	session  link.Session
	dials    int
	dial     map[port.Key][]netip.AddrPort
	outcomes map[port.Key][]port.Outcome
	acked    uint64
	resyncs  []string
	greet    func() []wire.Frame // what a new session begins with

	onSession func(link.Session)                              // runs beside each session
	onFlow    func(link.Stream, wire.FlowRequest) (took bool) // in place of the server

	at *link.Listener // nil where flows are streams of the session
	wg sync.WaitGroup
}

func newAgent(t *testing.T, name string) *agent {
	t.Helper()
	s, err := forward.NewServer(forward.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{
		t: t, name: name, server: s,
		dial:     make(map[port.Key][]netip.AddrPort),
		outcomes: make(map[port.Key][]port.Outcome),
	}
	if hasConnections(t) {
		dir, err := os.MkdirTemp("", "host") // t.TempDir is too long for a socket
		if err != nil {
			t.Fatal(err)
		}
		e := link.Endpoint{Network: link.NetworkUnix, Path: dir + "/d/s"}
		if a.at, err = link.Listen(t.Context(), e, a.options(link.RoleAgent)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = a.at.Close(), os.RemoveAll(dir) })
	}
	t.Cleanup(func() {
		a.drop(errors.New("test is over"))
		a.wg.Wait()
	})
	return a
}

// eachWay runs a test with a connection for each flow, and with flows that are
// streams of the session.
func eachWay(t *testing.T, test func(*testing.T)) {
	t.Helper()
	t.Run("connections", test)
	t.Run("streams", test)
}

// hasConnections reports whether flows of this test have connections. In a bubble of
// fake time, sockets would stop the time.
func hasConnections(t *testing.T) bool {
	t.Helper()
	return strings.HasSuffix(t.Name(), "/connections")
}

func (a *agent) options(r link.Role) link.Options {
	token, err := link.NewToken(strings.Repeat("k", 32))
	if err != nil {
		a.t.Error(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return link.Options{
		Role: r, Identity: a.name, Name: a.hello, Token: token, Logger: slog.New(slog.DiscardHandler),
		HandshakeTimeout: patience,
	}
}

func (a *agent) guest() Guest { return Guest{Name: a.name, Dial: a.connect} }

// connect is the host's Dial.
func (a *agent) connect(ctx context.Context) (link.Session, error) {
	a.mu.Lock()
	a.dials++
	err := a.down
	a.mu.Unlock()
	if err != nil {
		return nil, err
	}
	type result struct {
		s   link.Session
		err error
	}
	accepted := make(chan result, 1)
	var session link.Session
	if a.at != nil {
		go func() {
			s, err := a.at.Accept(ctx)
			accepted <- result{s, err}
		}()
		var d *link.Dialer
		if d, err = link.NewDialer(a.at.Endpoint(), a.options(link.RoleHost)); err == nil {
			session, err = d.Dial(ctx)
		}
	} else {
		near, far := net.Pipe()
		go func() {
			s, err := link.Server(ctx, far, a.options(link.RoleAgent))
			accepted <- result{s, err}
		}()
		session, err = link.Client(ctx, near, a.options(link.RoleHost))
	}
	r := <-accepted
	if err := errors.Join(err, r.err); err != nil {
		return nil, err
	}
	a.mu.Lock()
	greet := a.greet
	session = ofLife{session, a.life}
	a.mu.Unlock()
	a.wg.Go(func() { a.read(r.s) })
	a.wg.Go(func() { a.accept(r.s) })
	if a.onSession != nil {
		a.wg.Go(func() { a.onSession(r.s) })
	}
	if greet != nil {
		for _, f := range greet() {
			if err := sendFrame(r.s, f); err != nil {
				_, _ = session.Close(), r.s.Close()
				return nil, err
			}
		}
	}
	// The session begins with these messages; others may follow.
	a.mu.Lock()
	a.session, err = r.s, a.down
	a.mu.Unlock()
	if err != nil { // dropped meanwhile
		_, _ = session.Close(), r.s.Close()
		return nil, err
	}
	return session, nil
}

// ofLife is a session with one of the processes of an agent, whose listener outlives them.
type ofLife struct {
	link.Session
	life int
}

func (o ofLife) Peer() link.Peer {
	p := o.Session.Peer()
	p.Identity = fmt.Sprint(p.Identity, o.life)
	return p
}

func sendFrame(s link.Session, f wire.Frame) error {
	b, err := wire.EncodeFrame(&f)
	if err != nil {
		return err
	}
	return s.Control().Write(context.Background(), b)
}

func (a *agent) read(s link.Session) {
	for {
		var f wire.Frame
		b, err := s.Control().Read(context.Background())
		if err == nil {
			f, err = wire.DecodeFrame(b)
		}
		var put []port.Answer
		if err == nil {
			put, err = wire.DecodeRows(f.Put, port.Answer.Check)
		}
		if err != nil {
			_ = s.Close()
			return
		}
		a.mu.Lock()
		if f.Resync != "" {
			a.resyncs = append(a.resyncs, f.Resync)
		}
		for _, p := range put {
			a.outcomes[p.Key] = p.Outcomes
		}
		for _, v := range f.Seen {
			a.acked = v.Generation
		}
		a.mu.Unlock()
	}
}

func (a *agent) accept(s link.Session) {
	ctx, cancel := context.WithCancel(context.Background())
	var flows sync.WaitGroup
	defer flows.Wait()
	defer cancel()
	for {
		stream, err := s.Accept(ctx)
		if err != nil {
			return
		}
		flows.Go(func() {
			req, err := wire.ReadRequest(stream)
			if err != nil {
				_ = stream.Reset()
				return
			}
			a.mu.Lock()
			dial := a.dial[req.Key]
			a.mu.Unlock()
			if a.onFlow != nil && a.onFlow(stream, req) {
				return
			}
			_ = serveStream(ctx, a.server, stream, dial, req)
		})
	}
}

// serveStream serves a flow of a link as the agent does.
func serveStream(ctx context.Context, s *forward.Server, stream link.Stream, dial []netip.AddrPort, q wire.FlowRequest) error {
	req := forward.Request{Publication: port.Publication{Fact: port.Fact{Key: q.Key}, Dial: dial}, Peer: q.Peer, Answer: func(err error) error {
		r := wire.FlowReply{Status: wire.FlowOK}
		var d *forward.DialError
		if errors.As(err, &d) {
			r = wire.FlowReply{Status: wire.FlowUnreachable, Reason: d.Err.Error()}
			if d.Refused {
				r.Status = wire.FlowRefused
			}
		}
		return wire.WriteReply(stream, r)
	}}
	if q.Key.Protocol == port.UDP {
		return s.ServeUDP(ctx, link.NewDatagrams(stream), req)
	}
	return s.Serve(ctx, stream, req)
}

// drop breaks the link; the host cannot dial until up.
func (a *agent) drop(err error) {
	a.mu.Lock()
	a.down = err
	s := a.session
	a.session = nil
	a.mu.Unlock()
	if s != nil {
		_ = s.Close()
	}
}

func (a *agent) up() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.down = nil
}

// begins sets the first messages of each new session.
func (a *agent) begins(cs ...wire.Frame) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.greet = func() []wire.Frame { return cs }
}

// say sends control messages on the current session, and waits for one.
func (a *agent) say(cs ...wire.Frame) {
	a.t.Helper()
	var s link.Session
	eventually(a.t, "a session", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		s = a.session
		return s != nil
	})
	for _, c := range cs {
		if err := sendFrame(s, c); err != nil {
			a.t.Fatalf("agent %s: %v", a.name, err)
		}
	}
}

// rowsOf encodes rows of a table.
func rowsOf[T any](rows ...T) (b []byte) {
	for i, v := range rows {
		row, err := wire.EncodeRow(v)
		if err != nil {
			panic(err)
		}
		b = append(append(b, "[,"[min(i, 1)]), row...)
	}
	if b != nil {
		b = append(b, ']')
	}
	return b
}

func snapshot(generation uint64, pubs ...port.Fact) wire.Frame {
	return wire.Frame{Table: "wanted", Generation: generation, Put: rowsOf(pubs...)}
}

// parts are a snapshot in parts.
func parts(generation uint64, size int, pubs ...port.Fact) (list []wire.Frame) {
	for chunk := range slices.Chunk(pubs, size) {
		f := snapshot(generation, chunk...)
		f.Part, f.More = len(list), true
		list = append(list, f)
	}
	list[len(list)-1].More = false
	return list
}

// incomplete is a snapshot of a guest that has not read all of its sources.
func incomplete(generation uint64, pubs ...port.Fact) wire.Frame {
	c := snapshot(generation, pubs...)
	c.Partial = []string{"docker"}
	return c
}

func put(base uint64, pubs ...port.Fact) wire.Frame {
	return wire.Frame{Table: "wanted", Base: base, Generation: base + 1, Put: rowsOf(pubs...)}
}

func removed(base uint64, keys ...port.Key) wire.Frame {
	return wire.Frame{Table: "wanted", Base: base, Generation: base + 1, Removed: rowsOf(keys...)}
}

// whole and change are steps of the wanted set.
func whole(generation uint64, pubs ...port.Fact) replica.Step[port.Key, port.Fact] {
	return replica.Step[port.Key, port.Fact]{Generation: generation, Whole: true, Put: pubs}
}

func change(generation uint64, pubs ...port.Fact) replica.Step[port.Key, port.Fact] {
	return replica.Step[port.Key, port.Fact]{Generation: generation, Put: pubs}
}

// settled waits for the acknowledgement of a generation.
func (a *agent) settled(generation uint64) {
	a.t.Helper()
	eventually(a.t, fmt.Sprintf("ack of generation %d", generation), func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.acked == generation
	})
}

// heard returns the outcomes that the host reported of a key.
func (a *agent) heard(k port.Key) []port.Outcome {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.outcomes[k]
}

// wants waits until the host reports this state of k, and returns the first outcome.
func (a *agent) wants(k port.Key, state port.State) port.Outcome {
	a.t.Helper()
	var got []port.Outcome
	end := time.Now().Add(patience)
	for time.Now().Before(end) {
		if got = a.heard(k); len(got) > 0 && got[0].State == state {
			return got[0]
		}
		time.Sleep(time.Millisecond)
	}
	a.t.Fatalf("agent %s: %s is %+v, want %s", a.name, k, got, state)
	return port.Outcome{}
}

// start runs a host until the test ends, or stop is called.
func start(t *testing.T, opt Options, agents ...*agent) (h *Host, stop func()) {
	t.Helper()
	for _, a := range agents {
		opt.Guests = append(opt.Guests, a.guest())
	}
	return startGuests(t, opt)
}

// idle returns a host that does not run, so that a test takes its steps one by one.
func idle(t testing.TB, opt Options, guests ...string) *Host {
	t.Helper()
	for _, name := range guests {
		opt.Guests = append(opt.Guests, Guest{Name: name, Dial: func(context.Context) (link.Session, error) {
			return nil, errors.New("not dialled")
		}})
	}
	h, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	h.state.ctx = t.Context()
	t.Cleanup(h.withdraw)
	return h
}

func startGuests(t *testing.T, opt Options) (h *Host, stop func()) {
	t.Helper()
	if opt.BackoffMax == 0 {
		opt.BackoffMin, opt.BackoffMax = time.Millisecond, 20*time.Millisecond
	}
	h, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v", err)
		}
	})
	t.Cleanup(stop)
	return h, stop
}

func exposeAll(t *testing.T) Policy {
	t.Helper()
	set, err := rules.New(rules.Asked(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func policy(t *testing.T, expose rules.HostAddress, list ...rules.Rule) Policy {
	t.Helper()
	set, err := rules.New(expose, list)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// greeter writes a name to each connection to a TCP port of the guest, and closes it.
func (a *agent) greeter(k port.Key, name string) {
	a.t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		a.t.Fatal(err)
	}
	a.serve(k, ln.Addr().(*net.TCPAddr).AddrPort())
	a.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, name)
			_ = c.Close()
		}
	})
	a.t.Cleanup(func() { _ = ln.Close() })
}

// serve sets the dial targets of a key.
func (a *agent) serve(k port.Key, targets ...netip.AddrPort) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dial[k] = targets
}

func connect(t *testing.T, to netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.TCPConn)
}

// greeting returns what a connection to a host address receives.
func greeting(t *testing.T, to netip.AddrPort) string {
	t.Helper()
	c := connect(t, to)
	b, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("read from %s: %v", to, err)
	}
	_ = c.Close()
	return string(b)
}

// wasReset reports whether a new connection is reset, maybe before it is made.
func wasReset(t *testing.T, to netip.AddrPort) bool {
	t.Helper()
	c, err := net.Dial("tcp", to.String())
	if err == nil {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		_, err = c.Read(make([]byte, 1))
	}
	return isReset(err)
}

// refused reports whether nobody listens at a port. A probe that shows nothing of the
// port fails the test.
func refused(t *testing.T, to netip.AddrPort) bool {
	t.Helper()
	open, err := probe.Listens(probe.At(to.String()))
	if err != nil {
		t.Fatal(err)
	}
	return !open
}

// fds counts the open descriptors of this process.
func fds(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/dev/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// watched is a Network that counts what it opens.
type watched struct {
	own.Sockets
	mu     sync.Mutex
	opened []string
}

func (w *watched) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	ln, err := w.Sockets.Listen(ctx, network, address)
	if err == nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.opened = append(w.opened, network+" "+ln.Addr().String())
	}
	return ln, err
}

func (w *watched) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.opened)
}
