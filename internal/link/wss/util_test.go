// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestMain(m *testing.M) { leak.Main(m) }

// authority is a CA.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string // the bundle
}

func newAuthority(tb testing.TB, name string) *authority {
	tb.Helper()
	a := &authority{file: filepath.Join(tb.TempDir(), "ca.pem")}
	a.cert, a.key = sign(tb, nil, &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	})
	writePEM(tb, a.file, "CERTIFICATE", a.cert.Raw)
	return a
}

// sign makes a certificate, signed by a; by itself if a is nil.
func sign(tb testing.TB, a *authority, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	if template.NotAfter.IsZero() {
		template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	}
	parent, signer := template, key
	if a != nil {
		parent, signer = a.cert, a.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		tb.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatal(err)
	}
	return cert, key
}

// issue writes a certificate for names and its key to files.
func (a *authority) issue(tb testing.TB, template x509.Certificate) (certFile, keyFile string) {
	tb.Helper()
	cert, key := sign(tb, a, &template)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		tb.Fatal(err)
	}
	dir := tb.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writePEM(tb, certFile, "CERTIFICATE", cert.Raw)
	writePEM(tb, keyFile, "PRIVATE KEY", der)
	return certFile, keyFile
}

func writePEM(tb testing.TB, file, kind string, der []byte) {
	tb.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		tb.Fatal(err)
	}
}

func localhost() x509.Certificate {
	return x509.Certificate{Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"}}
}

func token(tb testing.TB, text string) link.Token {
	tb.Helper()
	t, err := link.NewToken(strings.Repeat(text, 32))
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

func options(role link.Role) link.Options {
	return link.Options{
		Role: role, Identity: link.NewIdentity(), Name: string(role), Logger: slog.New(slog.DiscardHandler),
		HandshakeTimeout: wait.Limit(),
	}
}

// rig is a server with what an agent needs to reach it.
type rig struct {
	tb     testing.TB
	ca     *authority
	server *Server
	ln     net.Listener
	at     string   // localhost:PORT
	dial   dialFunc // nil for TCP
	stop   func()   // ends the server
}

// start runs a server on which the guests a and b have the token "k".
func start(tb testing.TB, ca *authority, change func(*ServerOptions)) *rig {
	tb.Helper()
	r := newRig(tb, ca, change)
	r.serve("127.0.0.1:0")
	return r
}

// startInMemory is start with connections in memory, for tests in fake time.
func startInMemory(tb testing.TB, ca *authority, change func(*ServerOptions)) *rig {
	tb.Helper()
	r := newRig(tb, ca, change)
	ln := &memoryListener{conns: make(chan net.Conn), closed: make(chan struct{})}
	r.dial = ln.dial
	r.serveAt(ln)
	return r
}

func newRig(tb testing.TB, ca *authority, change func(*ServerOptions)) *rig {
	tb.Helper()
	cert, key := ca.issue(tb, localhost())
	o := ServerOptions{
		Link: options(link.RoleHost), Guests: []string{"a", "b"}, CertFile: cert, KeyFile: key, BundleFile: ca.file,
		Token: func(string) (link.Token, error) { return token(tb, "k"), nil },
	}
	if change != nil {
		change(&o)
	}
	s, err := NewServer(o)
	if err != nil {
		tb.Fatal(err)
	}
	return &rig{tb: tb, ca: ca, server: s}
}

// memoryListener accepts connections that do not leave the process.
type memoryListener struct {
	conns  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (l *memoryListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case l.conns <- memoryConn{far}:
		return near, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *memoryListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *memoryListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 443} }

// memoryConn is a connection with the address that a server expects.
type memoryConn struct{ net.Conn }

func (c memoryConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// serve runs the server at an address until stop, or the test's end.
func (r *rig) serve(at string) {
	r.tb.Helper()
	ln, err := net.Listen("tcp", at)
	if err != nil {
		r.tb.Fatal(err)
	}
	r.serveAt(ln)
}

func (r *rig) serveAt(ln net.Listener) {
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	r.ln, r.at = ln, net.JoinHostPort("localhost", port)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = r.server.Serve(ctx, ln)
	}()
	r.stop = func() {
		r.tb.Helper()
		cancel()
		wait.For(r.tb, "end of the server", done)
	}
	r.tb.Cleanup(r.stop)
}

// dialer is of the guest a, with the pin of the server's bundle.
func (r *rig) dialer(change func(*DialOptions)) *Dialer {
	r.tb.Helper()
	o := DialOptions{Link: options(link.RoleAgent), Server: r.at, Name: "a", Pin: r.server.Pin(), Proxy: noProxy, dial: r.dial}
	o.Link.Token = token(r.tb, "k")
	if change != nil {
		change(&o)
	}
	return NewDialer(o)
}

func noProxy(*url.URL) (*url.URL, error) { return nil, nil }

// connect returns both ends of a session.
func (r *rig) connect(d *Dialer) (host, agent link.Session) {
	r.tb.Helper()
	agent, err := d.Dial(r.tb.Context())
	if err != nil {
		r.tb.Fatal(err)
	}
	r.tb.Cleanup(func() { _ = agent.Close() })
	host, err = r.server.Session(r.tb.Context(), d.o.Name)
	if err != nil {
		r.tb.Fatal(err)
	}
	r.tb.Cleanup(func() { _ = host.Close() })
	return host, agent
}

func readBundle(tb testing.TB, ca *authority) []*x509.Certificate {
	tb.Helper()
	list, err := readCertificates(ca.file)
	if err != nil {
		tb.Fatal(err)
	}
	return list
}

// copyFile replaces a file's content, and its time beyond the clock's resolution.
func copyFile(tb testing.TB, from, to string) {
	tb.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		tb.Fatal(err)
	}
	if err := os.WriteFile(to, b, 0o600); err != nil {
		tb.Fatal(err)
	}
	later := time.Now().Add(time.Minute)
	if err := os.Chtimes(to, later, later); err != nil {
		tb.Fatal(err)
	}
}
