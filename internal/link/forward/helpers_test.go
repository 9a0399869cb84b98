// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/ports"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestMain(m *testing.M) { leak.Main(m) }

// patience is a limit that only a failure reaches.
var patience = wait.Limit()

// pair returns the two ends of a connection over loopback.
func pair(t *testing.T, network string) (near, far net.Conn) {
	t.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = t.TempDir() + "/s"
	}
	ln, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	near, err = net.Dial(network, ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err = ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{near, far} {
		_ = c.SetDeadline(time.Now().Add(patience))
		t.Cleanup(func() { _ = c.Close() })
	}
	return near, far
}

// sessions returns both ends of a real link.
func sessions(t *testing.T) (host, agent link.Session) {
	t.Helper()
	if inBubble(t) {
		a, b := net.Pipe()
		host, agent = linked(t, a, b)
	} else {
		host, agent = dialled(t, t.TempDir())
	}
	t.Cleanup(func() {
		_ = host.Close()
		_ = agent.Close()
	})
	return host, agent
}

func linkOptions(tb testing.TB, r link.Role) link.Options {
	tb.Helper()
	token, err := link.NewToken(strings.Repeat("k", 32))
	if err != nil {
		tb.Fatal(err)
	}
	return link.Options{
		Role: r, Identity: string(r), Token: token, Logger: slog.New(slog.DiscardHandler),
		HandshakeTimeout: patience,
	}
}

// linked makes a link of a connection.
func linked(tb testing.TB, near, far net.Conn) (host, agent link.Session) {
	tb.Helper()
	done := make(chan error, 1)
	go func() {
		var err error
		agent, err = link.Server(context.Background(), far, linkOptions(tb, link.RoleAgent))
		done <- err
	}()
	host, err := link.Client(context.Background(), near, linkOptions(tb, link.RoleHost))
	if err != nil {
		tb.Fatal(err)
	}
	if err := <-done; err != nil {
		tb.Fatal(err)
	}
	return host, agent
}

// dialled makes a link whose flows have connections of their own.
func dialled(tb testing.TB, dir string) (host, agent link.Session) {
	tb.Helper()
	e := link.Endpoint{Network: link.NetworkUnix, Path: dir + "/d/s"}
	l, err := link.Listen(tb.Context(), e, linkOptions(tb, link.RoleAgent))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = l.Close() })
	done := make(chan error, 1)
	go func() {
		var err error
		agent, err = l.Accept(context.Background())
		done <- err
	}()
	d, err := link.NewDialer(e, linkOptions(tb, link.RoleHost))
	if err != nil {
		tb.Fatal(err)
	}
	if host, err = d.Dial(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	if err := <-done; err != nil {
		tb.Fatal(err)
	}
	return host, agent
}

// inBubble reports whether the test runs in a synctest bubble, where sockets
// would keep time from moving on.
func inBubble(t *testing.T) bool {
	return strings.Contains(t.Name(), "Bubble")
}

// guest is a Server that answers the flows of a link.
type guest struct {
	*Server
	host link.Session
	pubs map[port.Key]port.Publication
}

func newGuest(t *testing.T, opt ServerOptions, pubs ...port.Publication) *guest {
	t.Helper()
	s, err := NewServer(opt)
	if err != nil {
		t.Fatal(err)
	}
	host, agent := sessions(t)
	g := &guest{Server: s, host: host, pubs: make(map[port.Key]port.Publication)}
	for _, p := range pubs {
		g.pubs[p.Key] = p
	}
	ctx, cancel := context.WithCancel(context.Background())
	accepted := make(chan struct{})
	flows := make(chan struct{}, 4096)
	go func() {
		defer close(accepted)
		for {
			stream, err := agent.Accept(ctx)
			if err != nil {
				return
			}
			flows <- struct{}{}
			go func() {
				defer func() { <-flows }()
				req, err := wire.ReadRequest(stream)
				if err != nil {
					_ = stream.Reset()
					return
				}
				_ = serveStream(ctx, s, stream, g.pubs[req.Key].Dial, req)
			}()
		}
	}()
	t.Cleanup(func() {
		cancel()
		_, _ = host.Close(), agent.Close()
		<-accepted
		for range cap(flows) {
			flows <- struct{}{}
		}
	})
	return g
}

// serveStream serves a flow of a link as the agent does.
func serveStream(ctx context.Context, s *Server, stream link.Stream, dial []netip.AddrPort, q wire.FlowRequest) error {
	req := Request{Publication: port.Publication{Fact: port.Fact{Key: q.Key}, Dial: dial}, Peer: q.Peer, Answer: func(err error) error {
		r := wire.FlowReply{Status: wire.FlowOK}
		var d *DialError
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

// open asks for a flow.
func (g *guest) open(t *testing.T, k port.Key, peer string) (link.Stream, wire.FlowReply) {
	t.Helper()
	stream, err := g.host.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = stream.SetDeadline(time.Now().Add(patience))
	req := wire.FlowRequest{Key: k}
	if peer != "" {
		req.Peer = netip.MustParseAddrPort(peer)
	}
	if err := wire.WriteRequest(stream, req); err != nil {
		t.Fatal(err)
	}
	reply, err := wire.ReadReply(stream)
	if err != nil {
		t.Fatal(err)
	}
	return stream, reply
}

// connect returns a client whose connection is carried to the publication, as
// the host does it.
func (g *guest) connect(t *testing.T, k port.Key) net.Conn {
	t.Helper()
	stream, reply := g.open(t, k, "127.0.0.1:50000")
	if reply.Status != wire.FlowOK {
		t.Fatalf("reply = %+v", reply)
	}
	_ = stream.SetDeadline(time.Time{})
	client, inner := pair(t, "tcp")
	_ = inner.SetDeadline(time.Time{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = Splice(context.Background(), inner, stream, nil)
	}()
	t.Cleanup(func() {
		_ = client.Close()
		Reset(inner)
		<-done
	})
	return client
}

// flow returns both ends of a connection that is carried through a guest.
func flow(t *testing.T) (g *guest, client, server net.Conn) {
	t.Helper()
	ln, pub := listen(t)
	g = newGuest(t, ServerOptions{}, pub)
	client = g.connect(t, pub.Key)
	server, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	_ = server.SetDeadline(time.Now().Add(patience))
	return g, client, server
}

func tcpKey(p uint16) port.Key {
	return port.Key{Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.1"), Port: p}
}

func udpKey(p uint16) port.Key {
	return port.Key{Protocol: port.UDP, Address: netip.MustParseAddr("127.0.0.1"), Port: p}
}

// listen returns a TCP listener in the guest and its publication.
func listen(t *testing.T) (*net.TCPListener, port.Publication) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	at := ln.Addr().(*net.TCPAddr).AddrPort()
	return ln.(*net.TCPListener), port.Publication{Fact: port.Fact{Key: tcpKey(at.Port())}, Dial: []netip.AddrPort{at}}
}

// closedPort returns an address that refuses connections and datagrams.
func closedPort(t *testing.T) netip.AddrPort {
	t.Helper()
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), ports.Free(t))
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, link.ErrReset)
}

func readAll(t *testing.T, c net.Conn) string {
	t.Helper()
	b, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("read: %v", err)
	}
	return string(b)
}

func write(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatalf("write: %v", err)
	}
}

func readN(t *testing.T, c net.Conn, n int) string {
	t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatalf("read %d bytes: %v", n, err)
	}
	return string(b)
}

// eventually waits until f returns true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
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
