// SPDX-License-Identifier: Apache-2.0

package hostlink_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/sink/hostlink"
	"github.com/fairlead/fairlead/internal/guest/sink/listener"
	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// TestMain runs the tests, or one of the relays that they start and kill.
func TestMain(m *testing.M) {
	if role := os.Getenv("RELAY_ROLE"); role != "" {
		if err := relay(role); err != nil && !errors.Is(err, context.Canceled) {
			fmt.Fprintln(os.Stderr, role, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	leak.Main(m)
}

const (
	transferSize = 64 << 20
	beforeKill   = 3 << 20 // bytes of each transfer, enough to have it spliced
	testTimeout  = time.Minute
)

// A transfer whose relay is killed must not look complete: the kernel closes the
// relay's sockets, and a plain close would end the stream like a finished one.
func TestKilledRelayResetsItsTransfers(t *testing.T) {
	for _, tt := range []struct {
		name   string
		roles  []string
		killed string
	}{
		{"host", []string{"agent", "host"}, "host"},
		{"agent", []string{"agent", "host"}, "agent"},
		{"host with streams", []string{"agent", "streams"}, "streams"},
		{"agent with streams", []string{"agent", "streams"}, "agent"},
		{"listener sink", []string{"listener"}, "listener"},
		{"bridge", []string{"bridge"}, "bridge"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newKillRig(t, tt.roles...)
			const each = 4
			results := make(chan string, 2*each)
			var ready, done sync.WaitGroup
			ready.Add(2 * each)
			killed := make(chan struct{})
			for range each {
				done.Go(func() { results <- r.download(&ready, killed) })
				done.Go(func() { results <- r.upload(&ready, killed) })
			}
			ready.Wait()
			r.kill(tt.killed)
			close(killed)
			done.Wait()
			close(results)
			for res := range results {
				if res != "" {
					t.Error(res)
				}
			}
		})
	}
}

// A transfer that ends in order is delivered whole, however slow its reader.
func TestSlowReaderGetsAll(t *testing.T) {
	for name, roles := range map[string][]string{
		"link": {"agent", "host"}, "streams": {"agent", "streams"}, "listener sink": {"listener"}, "bridge": {"bridge"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newKillRig(t, roles...)
			for _, what := range []string{"download", "upload"} {
				client, server, err := r.connect()
				if err != nil {
					t.Fatal(err)
				}
				from, to := server, client
				if what == "upload" {
					from, to = client, server
				}
				if err := slowly(from, to); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
	}
}

// slowly sends a whole transfer and closes, while its reader, which sends
// nothing, leaves much of it in the buffers of the relays.
func slowly(from, to *net.TCPConn) error {
	defer to.Close()
	_ = to.SetReadBuffer(64 << 10)
	if err := to.CloseWrite(); err != nil {
		return err
	}
	sent, received := sha256.New(), sha256.New()
	sending := make(chan error, 1)
	go func() {
		data := rand.NewChaCha8([32]byte{1})
		_, err := io.CopyN(io.MultiWriter(from, sent), data, transferSize)
		sending <- errors.Join(err, from.Close())
	}()
	var n int64
	for n < transferSize {
		m, err := io.CopyN(received, to, transferSize/16)
		n += m
		if err != nil {
			return fmt.Errorf("%d of %d bytes: %w", n, transferSize, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if _, err := to.Read(make([]byte, 1)); err != io.EOF {
		return fmt.Errorf("at the end: %w", err)
	}
	if err := <-sending; err != nil {
		return err
	}
	if !bytes.Equal(sent.Sum(nil), received.Sum(nil)) {
		return errors.New("received other bytes than were sent")
	}
	return nil
}

// killRig is a server in this process, behind relays that are processes of
// their own.
type killRig struct {
	t      *testing.T
	at     netip.AddrPort // where the relays listen
	server net.Listener
	relays map[string]*exec.Cmd

	connecting sync.Mutex // one at a time, so that client and server match
}

func newKillRig(t *testing.T, roles ...string) *killRig {
	t.Helper()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	r := &killRig{
		t: t, at: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), ports.Free(t)),
		server: server, relays: make(map[string]*exec.Cmd),
	}
	socket := filepath.Join(t.TempDir(), "d", "s")
	for _, role := range roles {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "RELAY_ROLE="+role, "RELAY_LINK=unix://"+socket,
			"RELAY_AT="+r.at.String(), "RELAY_TARGET="+server.Addr().String())
		cmd.Stderr = os.Stderr
		stdin, err := cmd.StdinPipe() // ends with this process, and the relay with it
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = stdin.Close(), cmd.Wait() })
		r.relays[role] = cmd
	}
	return r
}

func (r *killRig) kill(role string) {
	cmd := r.relays[role]
	if err := cmd.Process.Kill(); err != nil {
		r.t.Error(err)
	}
	_, _ = cmd.Process.Wait()
}

// connect returns both ends of a connection through the relays.
func (r *killRig) connect() (client, server *net.TCPConn, err error) {
	r.connecting.Lock()
	defer r.connecting.Unlock()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}} // a bridge serves others only
	for end := time.Now().Add(testTimeout); ; {
		c, err := d.Dial("tcp", r.at.String())
		if err == nil {
			client = c.(*net.TCPConn)
			break
		}
		if time.Now().After(end) {
			return nil, nil, err
		}
		time.Sleep(10 * time.Millisecond)
	}
	c, err := r.server.Accept()
	if err != nil {
		return nil, nil, err
	}
	for _, c := range []net.Conn{client, c} {
		_ = c.SetDeadline(time.Now().Add(testTimeout))
	}
	return client, c.(*net.TCPConn), nil
}

// download lets the server send, and upload the client, until the relay was
// killed. They return what is wrong.
func (r *killRig) download(ready *sync.WaitGroup, killed <-chan struct{}) string {
	client, server, err := r.connect()
	if err != nil {
		ready.Done()
		return err.Error()
	}
	return transfer("download", server, client, ready, killed)
}

func (r *killRig) upload(ready *sync.WaitGroup, killed <-chan struct{}) string {
	client, server, err := r.connect()
	if err != nil {
		ready.Done()
		return err.Error()
	}
	return transfer("upload", client, server, ready, killed)
}

func transfer(what string, from, to *net.TCPConn, ready *sync.WaitGroup, killed <-chan struct{}) string {
	defer to.Close()
	var sending sync.WaitGroup
	defer sending.Wait()
	sending.Go(func() {
		defer from.Close()
		_, _ = from.Write(make([]byte, transferSize))
	})
	n, err := io.CopyN(io.Discard, to, beforeKill)
	ready.Done()
	if err != nil {
		return fmt.Sprintf("%s: %d bytes, then %v before the relay was killed", what, n, err)
	}
	<-killed
	m, err := io.Copy(io.Discard, to)
	switch n += m; {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Sprintf("%s: stuck after %d bytes", what, n)
	case err == nil && n < transferSize:
		return fmt.Sprintf("%s: looked complete after %d of %d bytes", what, n, transferSize)
	}
	return ""
}

// relay is the process that the test kills: it relays what connects to RELAY_AT
// to RELAY_TARGET, or plays the host or the agent of a link that does.
func relay(role string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
		cancel()
	}()
	at, target := netip.MustParseAddrPort(os.Getenv("RELAY_AT")), netip.MustParseAddrPort(os.Getenv("RELAY_TARGET"))
	e, err := link.ParseEndpoint(os.Getenv("RELAY_LINK"))
	if err != nil {
		return err
	}
	pub := port.Publication{
		Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: at.Addr(), Port: at.Port()}, Decision: port.Decision{Allow: true, Host: []netip.AddrPort{at}}},
		Dial: []netip.AddrPort{target},
	}
	server, err := forward.NewServer(forward.ServerOptions{})
	if err != nil {
		return err
	}
	switch role {
	case "agent":
		return relayAgent(ctx, e, server, pub)
	case "host":
		return relayHost(ctx, e, func(s link.Session) link.Session { return s })
	case "streams":
		return relayHost(ctx, e, func(s link.Session) link.Session { return streams{s} })
	case "listener":
		return relayListener(ctx, server, pub)
	case "bridge":
		return relayBridge(ctx, server, pub)
	}
	return errors.New("no such role")
}

var quiet = slog.New(slog.DiscardHandler)

func linkOptions(r link.Role) link.Options {
	return link.Options{Role: r, Identity: link.NewIdentity(), Logger: quiet}
}

// reconciled runs a sink that has one publication.
func reconciled(ctx context.Context, sinks []reconcile.Sink, o reconcile.Options, pub port.Publication, run func(context.Context) error) error {
	from := table.New[port.Key, port.Publication](port.Key.Compare)
	from.Update(func(tx *table.Tx[port.Key, port.Publication]) { tx.Put(pub.Key, pub) })
	rec := reconcile.New(from, sinks, o)
	go func() { _ = rec.Run(ctx) }()
	return run(ctx)
}

func relayAgent(ctx context.Context, e link.Endpoint, server *forward.Server, pub port.Publication) error {
	l, err := link.Listen(ctx, e, linkOptions(link.RoleAgent))
	if err != nil {
		return err
	}
	defer l.Close()
	s, err := hostlink.New(l, hostlink.Options{
		Serve: server.Serve, ServeUDP: server.ServeUDP, Logger: quiet,
		Lookup: func(k port.Key) (port.Publication, bool) { return pub, k == pub.Key },
	})
	if err != nil {
		return err
	}
	return reconciled(ctx, nil, reconcile.Options{Follower: s, Logger: quiet}, pub, s.Run)
}

// streams is a session whose flows have no connections of their own.
type streams struct{ link.Session }

func (s streams) Connect(ctx context.Context) (link.Stream, error) { return s.Open(ctx) }

func relayHost(ctx context.Context, e link.Endpoint, wrap func(link.Session) link.Session) error {
	d, err := link.NewDialer(e, linkOptions(link.RoleHost))
	if err != nil {
		return err
	}
	h, err := host.New(host.Options{
		Logger: quiet,
		Guests: []host.Guest{{Name: "vm", Dial: func(ctx context.Context) (link.Session, error) {
			s, err := d.Dial(ctx)
			if err != nil {
				return nil, err
			}
			return wrap(s), nil
		}}},
	})
	if err != nil {
		return err
	}
	return h.Run(ctx)
}

func relayListener(ctx context.Context, server *forward.Server, pub port.Publication) error {
	s, err := listener.New(listener.Options{
		Network: new(own.Sockets), Serve: server.Carry, Settle: time.Millisecond, Logger: quiet,
		Sockets: func(port.Slot) []port.Publication { return nil },
	})
	if err != nil {
		return err
	}
	return reconciled(ctx, []reconcile.Sink{s}, reconcile.Options{Logger: quiet}, pub, s.Run)
}

func relayBridge(ctx context.Context, server *forward.Server, pub port.Publication) error {
	sockets := new(own.Sockets)
	b := peer.NewBridges(peer.BridgeOptions{
		Loopback: true,
		Listen:   sockets.Listen, ListenPacket: sockets.ListenPacket,
		Serve: server.Carry, ServeUDP: server.ServeUDP, Logger: quiet,
	})
	defer b.Close()
	if _, err := b.Open(ctx, pub.Slot(), pub, peer.Side{At: pub.Address, From: netip.PrefixFrom(pub.Address, 8)}, pub.Port); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}
