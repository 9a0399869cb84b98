// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package fleet tests one host peer with many agents that dial it.
package fleet

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/sink/hostlink"
	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/wss"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	kitports "github.com/fairlead/fairlead/internal/testkit/ports"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/usage"
)

func TestMain(m *testing.M) { leak.Main(m) }

// fleet is what agents and hosts of one test share.
type fleet struct {
	t     *testing.T
	dir   string
	token link.Token
	names []string
}

func newFleet(t *testing.T, n int) *fleet {
	t.Helper()
	token, err := link.NewToken(strings.Repeat("k", 32))
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{t: t, dir: t.TempDir(), token: token}
	for i := range n {
		f.names = append(f.names, fmt.Sprintf("agent-%d", i))
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	f.write("cert.pem", "CERTIFICATE", der)
	f.write("key.pem", "PRIVATE KEY", private)
	return f
}

func (f *fleet) write(name, kind string, der []byte) {
	f.t.Helper()
	if err := os.WriteFile(filepath.Join(f.dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fleet) options(role link.Role, name string) link.Options {
	return link.Options{
		Role: role, Identity: link.NewIdentity(), Name: name, Token: f.token, Logger: slog.New(slog.DiscardHandler), HandshakeTimeout: wait.Limit(),
	}
}

// hub is one life of the host peer.
type hub struct {
	host   *host.Host
	server *wss.Server
	at     string // HOST:PORT for agents
	stop   func()
}

// elsewhere puts guest port N at 127.0.0.2:N of the host: the guests of this test have
// the host's own loopback.
type elsewhere struct{}

func (elsewhere) Host(_ string, p port.Publication, _ []netip.AddrPort) port.Ruling {
	return port.Ruling{Decision: port.Decision{Allow: true, Host: []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), p.Port)}}}
}

// grace is how long the host keeps the ports of an agent that left.
const grace = time.Second

func (f *fleet) start(at string) *hub {
	f.t.Helper()
	server, err := wss.NewServer(wss.ServerOptions{
		Link: f.options(link.RoleHost, "hub"), Guests: f.names, CertFile: filepath.Join(f.dir, "cert.pem"), KeyFile: filepath.Join(f.dir, "key.pem"),
		Token: func(string) (link.Token, error) { return f.token, nil },
	})
	if err != nil {
		f.t.Fatal(err)
	}
	o := host.Options{Policy: elsewhere{}, Grace: grace}
	for _, name := range f.names {
		o.Guests = append(o.Guests, host.Guest{Name: name, Dials: true, Dial: func(ctx context.Context) (link.Session, error) {
			return server.Session(ctx, name)
		}})
	}
	h, err := host.New(o)
	if err != nil {
		f.t.Fatal(err)
	}
	ln, err := net.Listen("tcp", at)
	if err != nil {
		f.t.Fatal(err)
	}
	_, p, _ := net.SplitHostPort(ln.Addr().String())
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(ctx, ln) })
	wg.Go(func() { _ = h.Run(ctx) })
	u := &hub{host: h, server: server, at: net.JoinHostPort("localhost", p)}
	u.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
	})
	f.t.Cleanup(u.stop)
	return u
}

// agent runs the link of one agent: hostlink, reconciler and redialer, with one
// publication whose server answers with the agent's name.
func (f *fleet) agent(name string, u *hub) (p uint16, stop func()) {
	f.t.Helper()
	return f.changedAgent(name, u, func(*wss.DialOptions) {})
}

// changedAgent is agent with other options of its link.
func (f *fleet) changedAgent(name string, u *hub, change func(*wss.DialOptions)) (p uint16, stop func()) {
	f.t.Helper()
	ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", kitports.Free(f.t))) // the host needs the number, too
	if err != nil {
		f.t.Fatal(err)
	}
	at := ln.Addr().(*net.TCPAddr).AddrPort()
	k := port.Key{Protocol: port.TCP, Address: at.Addr(), Port: at.Port()}
	from := table.New[port.Key, port.Publication](port.Key.Compare)
	from.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		tx.Put(k, port.Publication{Fact: port.Fact{Key: k, Decision: port.Decision{Allow: true, Host: []netip.AddrPort{at}}}, Dial: []netip.AddrPort{at}})
	})
	server, err := forward.NewServer(forward.ServerOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
	var rec *reconcile.Reconciler
	o := f.options(link.RoleAgent, name)
	d := wss.DialOptions{
		Link: o, Server: u.at, Name: name, Pin: u.server.Pin(), Proxy: func(*url.URL) (*url.URL, error) { return nil, nil },
	}
	change(&d)
	sink, err := hostlink.New(wss.NewRedialer(d), hostlink.Options{
		Logger: o.Logger, Serve: server.Serve, ServeUDP: server.ServeUDP,
		Lookup: func(k port.Key) (port.Publication, bool) { return rec.Wanted().View().Get(k) },
	})
	if err != nil {
		f.t.Fatal(err)
	}
	rec = reconcile.New(from, nil, reconcile.Options{Logger: o.Logger, Denied: sink.Reset, Follower: sink})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = sink.Run(ctx) })
	wg.Go(func() { _ = rec.Run(ctx) })
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, name)
			_ = c.Close()
		}
	})
	stop = sync.OnceFunc(func() {
		cancel()
		_ = ln.Close()
		wg.Wait()
	})
	f.t.Cleanup(stop)
	return at.Port(), stop
}

// check waits until the host has these guests' ports, and no other, and each leads to
// its guest.
func (u *hub) check(t *testing.T, ports map[string]uint16) {
	t.Helper()
	wait.Until(t, "all guests, and no ghost", func() error {
		connected := 0
		for _, g := range u.host.Guests() {
			if g.Connected {
				connected++
			}
		}
		if v := u.host.View(); connected != len(ports) || v.Len() != len(ports) {
			return fmt.Errorf("%d guests, %d publications, want %d", connected, v.Len(), len(ports))
		}
		for _, p := range u.host.View().All() {
			if p.State() != port.Active || p.Lost {
				return fmt.Errorf("%v of %s: %v", p.Key, p.Guest, p.Outcomes)
			}
		}
		if n := u.host.Stats().Listeners; n != len(ports) {
			return fmt.Errorf("%d listeners, want %d", n, len(ports))
		}
		return nil
	})
	for name, p := range ports {
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.2:%d", p))
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(c)
		if string(b) != name || err != nil {
			t.Errorf("the port of %s answers %q, %v", name, b, err)
		}
		_ = c.Close()
	}
}

// measured logs the time and what the process, which is agents and host at once, used in it.
func measured(t *testing.T, what string, began usage.Usage) usage.Usage {
	t.Helper()
	now := read(t)
	t.Logf("%s: %v, %v of CPU; %d MiB of memory, %d MiB at most", what, now.At.Sub(began.At).Round(time.Millisecond),
		(now.CPU - began.CPU).Round(time.Millisecond), now.RSS>>20, now.Peak>>20)
	return now
}

func read(t *testing.T) usage.Usage {
	t.Helper()
	u, err := usage.Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// sessions returns since when each guest is connected.
func (u *hub) sessions() map[string]time.Time {
	since := make(map[string]time.Time)
	for _, g := range u.host.Guests() {
		if g.Connected {
			since[g.Name] = g.Since
		}
	}
	return since
}

// kept checks that these guests, but for one, are in the sessions that they had before.
func (u *hub) kept(t *testing.T, before map[string]time.Time, ports map[string]uint16, but string) {
	t.Helper()
	now := u.sessions()
	for name := range ports {
		if since, ok := now[name]; name != but && (!ok || !since.Equal(before[name])) {
			t.Errorf("the session of %s ended with that of another", name)
		}
	}
}

// Many agents, each named, on one host. The host restarts, all return, and what left
// meanwhile leaves nothing behind. Then half of them end, and the others notice nothing.
func TestManyAgents(t *testing.T) {
	f := newFleet(t, rounds.Of(t, "FAIRLEAD_AGENTS", agents))
	u := f.start("127.0.0.1:0")
	ports, stops := make(map[string]uint16), make(map[string]func())
	began := read(t)
	for _, name := range f.names {
		ports[name], stops[name] = f.agent(name, u)
	}
	u.check(t, ports)
	measured(t, fmt.Sprintf("%d agents start and answer", len(ports)), began)

	u.stop()
	for _, name := range f.names[:len(f.names)/10] { // these do not return
		stops[name]()
		delete(ports, name)
	}
	_, p, _ := net.SplitHostPort(u.at)
	began = read(t)
	u = f.start("127.0.0.1:" + p)
	u.check(t, ports)
	began = measured(t, fmt.Sprintf("%d agents are back after the restart of the host", len(ports)), began)

	before := u.sessions()
	var wg sync.WaitGroup
	for _, name := range f.names[len(f.names)/10 : len(f.names)/2] {
		wg.Go(stops[name])
		delete(ports, name)
	}
	wg.Wait()
	u.check(t, ports)
	measured(t, fmt.Sprintf("%d agents remain after the others ended", len(ports)), began)
	u.kept(t, before, ports, "")
}

// hole passes connections on. Those that exist when it is silenced lose all bytes from then
// on, without an end.
type hole struct {
	net.Listener
	to      string
	silence atomic.Int32 // how often it was silenced
}

func newHole(t *testing.T, to string) *hole {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &hole{Listener: ln, to: to}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			near, err := ln.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				_ = near.Close()
				continue
			}
			n := h.silence.Load()
			wg.Go(func() { h.pass(near, far, n) })
			wg.Go(func() { h.pass(far, near, n) })
		}
	})
	t.Cleanup(wg.Wait) // once agents and host have closed their ends
	t.Cleanup(func() { _ = ln.Close() })
	return h
}

func (h *hole) pass(to, from net.Conn, silenced int32) {
	defer from.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		if h.silence.Load() == silenced {
			if err == nil {
				_, err = to.Write(b[:n])
			}
			if err != nil {
				_ = to.Close()
			}
		}
		if err != nil {
			return
		}
	}
}

// Agents that take a name, have another token, or vanish without an end harm no others.
func TestBadAgents(t *testing.T) {
	f := newFleet(t, 8)
	u := f.start("127.0.0.1:0")
	h := newHole(t, u.at)
	_, p, _ := net.SplitHostPort(h.Addr().String())
	ports := make(map[string]uint16)
	for _, name := range f.names[1:] {
		ports[name], _ = f.agent(name, u)
	}
	lost := f.names[0]
	ports[lost], _ = f.changedAgent(lost, u, func(o *wss.DialOptions) {
		o.Server, o.Link.KeepAlive = "localhost:"+p, 2*time.Second // it finds the loss; a stall of the machine ends no other session
	})
	u.check(t, ports)

	stranger, err := link.NewToken(strings.Repeat("x", 32))
	if err != nil {
		t.Fatal(err)
	}
	twice, forged := f.names[1], f.names[2]
	before := u.sessions()
	_, _ = f.agent(twice, u)
	_, _ = f.changedAgent(forged, u, func(o *wss.DialOptions) { o.Link.Token = stranger })
	for _, name := range []string{twice, forged} {
		wait.Until(t, "refusal of another "+name, func() error {
			if r := u.server.LastRefused(name); r.Err == nil {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
	}
	u.check(t, ports)

	old := u.sessions()[lost]
	h.silence.Add(1)
	wait.Until(t, "return of the agent that vanished", func() error {
		if since, ok := u.sessions()[lost]; !ok || since.Equal(old) {
			return fmt.Errorf("%s: %v since %v", lost, ok, since)
		}
		return nil
	})
	u.check(t, ports)
	u.kept(t, before, ports, lost)
}
