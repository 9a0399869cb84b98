// SPDX-License-Identifier: Apache-2.0

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
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/forward"
	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wss"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/sink/hostlink"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/test/kit/leak"
	"github.com/fairlead/fairlead/test/kit/rounds"
	"github.com/fairlead/fairlead/test/kit/wait"
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

func (elsewhere) Host(_ string, p port.Publication, _ []netip.AddrPort) port.Decision {
	return port.Decision{Allow: true, Host: []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), p.Port)}}
}

func (f *fleet) start(at string) *hub {
	f.t.Helper()
	server, err := wss.NewServer(wss.ServerOptions{
		Link: f.options(link.RoleHost, "hub"), Guests: f.names, CertFile: filepath.Join(f.dir, "cert.pem"), KeyFile: filepath.Join(f.dir, "key.pem"),
		Token: func(string) (link.Token, error) { return f.token, nil },
	})
	if err != nil {
		f.t.Fatal(err)
	}
	o := host.Options{Policy: elsewhere{}, Grace: -1}
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
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.t.Fatal(err)
	}
	at := ln.Addr().(*net.TCPAddr).AddrPort()
	k := port.Key{Protocol: port.TCP, Address: at.Addr(), Port: at.Port()}
	from := table.New[port.Key, port.Publication](port.Key.Compare)
	from.Update(func(tx *table.Tx[port.Key, port.Publication]) {
		tx.Put(k, port.Publication{Key: k, Dial: []netip.AddrPort{at}, Decision: port.Decision{Allow: true, Host: []netip.AddrPort{at}}})
	})
	server, err := forward.NewServer(forward.ServerOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
	var rec *reconcile.Reconciler
	o := f.options(link.RoleAgent, name)
	redialer := wss.NewRedialer(wss.DialOptions{
		Link: o, Server: u.at, Name: name, Pin: u.server.Pin(), Proxy: func(*url.URL) (*url.URL, error) { return nil, nil },
	})
	sink, err := hostlink.New(redialer, hostlink.Options{
		Epoch: o.Identity, Logger: o.Logger, Serve: server.Serve, ServeUDP: server.ServeUDP,
		Lookup: func(k port.Key) (port.Publication, bool) { return rec.Wanted().View().Get(k) },
	})
	if err != nil {
		f.t.Fatal(err)
	}
	rec = reconcile.New(from, []reconcile.Sink{sink}, reconcile.Options{Logger: o.Logger, Denied: sink.Reset})
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

// Many agents, each named, on one host. The host restarts, all return, and what left
// meanwhile leaves nothing behind.
func TestManyAgents(t *testing.T) {
	f := newFleet(t, rounds.Of(t, "FAIRLEAD_AGENTS", agents))
	u := f.start("127.0.0.1:0")
	ports, stops := make(map[string]uint16), make(map[string]func())
	for _, name := range f.names {
		ports[name], stops[name] = f.agent(name, u)
	}
	began := time.Now()
	u.check(t, ports)
	t.Logf("%d agents are connected and answer %v after their start", len(ports), time.Since(began))

	u.stop()
	for _, name := range f.names[:len(f.names)/10] { // these do not return
		stops[name]()
		delete(ports, name)
	}
	_, p, _ := net.SplitHostPort(u.at)
	began = time.Now()
	u = f.start("127.0.0.1:" + p)
	u.check(t, ports)
	t.Logf("%d agents are back and answer %v after the restart of the host", len(ports), time.Since(began))
}
