// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// guarded is a dialer whose token must not be read.
func guarded(t *testing.T, o *DialOptions) {
	t.Helper()
	o.Link.Token = link.Token{}
	o.Link.LoadToken = func() (link.Token, error) {
		t.Error("the token was read")
		return token(t, "k"), nil
	}
}

// refuses checks that a dial fails, for a reason, before the token is read.
func (r *rig) refuses(t *testing.T, want string, change func(*DialOptions)) {
	t.Helper()
	s, err := r.dialer(func(o *DialOptions) {
		guarded(t, o)
		if change != nil {
			change(o)
		}
	}).Dial(t.Context())
	if err == nil {
		_ = s.Close()
		t.Fatalf("connected, want %q", want)
	}
	if !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

// Nothing but the request for the bundle is sent to a server with another bundle, even
// to one that the system trusts.
func TestWrongPin(t *testing.T) {
	ca := newAuthority(t, "public")
	r := start(t, ca, nil)
	t.Setenv("SSL_CERT_FILE", ca.file) // the system trusts it, if nothing read its roots before
	var requests []string
	var mu sync.Mutex
	recorder := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		requests = append(requests, q.URL.Path)
		for _, secret := range []string{"Authorization", "Cookie", "Proxy-Authorization"} {
			if q.Header.Get(secret) != "" {
				t.Errorf("%s was sent", secret)
			}
		}
		_, _ = w.Write(r.server.bundle)
	}))
	recorder.TLS = r.server.tlsConfig()
	recorder.StartTLS()
	t.Cleanup(recorder.Close)
	_, port, _ := net.SplitHostPort(recorder.Listener.Addr().String())
	wrong := r.server.Pin()
	wrong[0] ^= 1
	for range 2 { // a bundle that does not match is not kept
		r.refuses(t, "want the pin "+wrong.String(), func(o *DialOptions) { o.Pin, o.Server = wrong, "localhost:"+port })
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(requests, []string{pathBundle, pathBundle}) {
		t.Errorf("requests %q", requests)
	}
}

// The pin is the same whatever the line ends, and changes with all else.
func TestPinIgnoresLineEnds(t *testing.T) {
	bundle, err := os.ReadFile(newAuthority(t, "test").file)
	if err != nil {
		t.Fatal(err)
	}
	pin := PinOf(bundle)
	none := bytes.TrimRight(bundle, "\n")
	crlf := bytes.ReplaceAll(bundle, []byte("\n"), []byte("\r\n"))
	for name, variant := range map[string][]byte{
		"none": none, "one": append(slices.Clip(none), '\n'), "two": append(slices.Clip(none), "\n\n"...),
		"CRLF": crlf, "CRLF and none": bytes.TrimRight(crlf, "\r\n"), "two CRLF": append(slices.Clip(crlf), "\r\n"...),
	} {
		if PinOf(variant) != pin || !pin.matches(variant) {
			t.Errorf("%s: another pin", name)
		}
		if list, err := certificates(variant); err != nil || len(list) != 1 {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, variant := range map[string][]byte{
		"empty": nil, "a space at the end": append(slices.Clip(bundle), ' '), "another certificate": append(slices.Clip(bundle), bundle...),
	} {
		if PinOf(variant) == pin {
			t.Errorf("%s: the same pin", name)
		}
	}
	// As sha256sum of coreutils prints it.
	if got := PinOf([]byte("hello")).String(); got != "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03" {
		t.Errorf("pin %s", got)
	}
}

// Servers serve certificates only, even if their files have more.
func TestBundleHasNoKey(t *testing.T) {
	ca := newAuthority(t, "test")
	var cert, key string
	r := start(t, ca, func(o *ServerOptions) {
		cert, key = o.CertFile, o.KeyFile
		k, err := os.ReadFile(key)
		if err != nil {
			t.Fatal(err)
		}
		c, err := os.ReadFile(cert)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(cert, append(k, c...), 0o600); err != nil {
			t.Fatal(err)
		}
		o.BundleFile = ""
	})
	if bytes.Contains(r.server.bundle, []byte("PRIVATE")) || bytes.Count(r.server.bundle, []byte("BEGIN")) != 1 {
		t.Errorf("bundle %s", r.server.bundle)
	}
}

func TestUntrustedServers(t *testing.T) {
	ca, other := newAuthority(t, "test"), newAuthority(t, "other")
	serving := func(by *authority, template x509.Certificate) *rig {
		return start(t, ca, func(o *ServerOptions) { o.CertFile, o.KeyFile = by.issue(t, template) })
	}
	expired := localhost()
	expired.NotBefore, expired.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
	client := localhost()
	client.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	for name, tt := range map[string]struct {
		r    *rig
		want string
	}{
		"wrong host name":              {serving(ca, x509.Certificate{DNSNames: []string{"hub.example"}}), "not localhost"},
		"expired":                      {serving(ca, expired), "expired"},
		"other authority":              {serving(other, localhost()), "unknown authority"},
		"certificate of a client only": {serving(ca, client), "incompatible key usage"},
	} {
		t.Run(name, func(t *testing.T) { tt.r.refuses(t, tt.want, nil) })
	}
	// Without a pin the system's roots count, which know none of ours.
	start(t, ca, nil).refuses(t, "unknown authority", func(o *DialOptions) { o.Pin = Pin{} })
}

func TestWrongToken(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	_, err := r.dialer(func(o *DialOptions) { o.Link.Token = token(t, "x") }).Dial(t.Context())
	if !link.Unwelcome(err) || !strings.Contains(err.Error(), "tokens of agent and host differ") {
		t.Errorf("%v", err)
	}
}

func TestUnknownName(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	for _, name := range []string{"c", "", "..", "a/b", "A"} {
		r.refuses(t, "the server answers ", func(o *DialOptions) { o.Name = name })
	}
}

// A relay with a certificate that the agent trusts passes on what both sides send: the
// proofs do not match, as they include the TLS connection.
func TestRelayWithCertificateIsRefused(t *testing.T) {
	ca := newAuthority(t, "test")
	r := start(t, ca, nil)
	certFile, keyFile := ca.issue(t, localhost())
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			near, err := ln.Accept()
			if err != nil {
				return
			}
			far, err := tls.Dial("tcp", r.at, &tls.Config{RootCAs: poolOf(readBundle(t, ca)), ServerName: "localhost"})
			if err != nil {
				_ = near.Close()
				continue
			}
			go pass(near, far)
			go pass(far, near)
		}
	}()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	_, err = r.dialer(func(o *DialOptions) { o.Server = "localhost:" + port }).Dial(t.Context())
	if err == nil || !strings.Contains(err.Error(), "differ") {
		t.Errorf("%v", err)
	}
}

func pass(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	_ = to.Close()
}

func TestClientCertificate(t *testing.T) {
	ca, clients, other := newAuthority(t, "test"), newAuthority(t, "clients"), newAuthority(t, "other")
	r := start(t, ca, func(o *ServerOptions) { o.ClientCAFile, o.Token = clients.file, nil })
	of := func(by *authority, name string) func(*DialOptions) {
		return func(o *DialOptions) {
			o.Link.Token = link.Token{}
			o.CertFile, o.KeyFile = by.issue(t, x509.Certificate{Subject: pkix.Name{CommonName: name}})
		}
	}
	host, agent := r.connect(r.dialer(of(clients, "a")))
	if host.Peer().Proof != "certificate a" || agent.Peer().Proof != "certificate "+r.at {
		t.Errorf("proofs %q and %q", host.Peer().Proof, agent.Peer().Proof)
	}
	carry(t, host, agent, []byte("hello"))
	for name, tt := range map[string]struct {
		change func(*DialOptions)
		want   string
	}{
		"none":            {func(*DialOptions) {}, "a certificate of the guest is required"},
		"of another":      {of(clients, "b"), "not of the guest"},
		"other authority": {of(other, "a"), ""},
	} {
		if _, err := r.dialer(tt.change).Dial(t.Context()); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// proxy is an HTTP proxy that answers CONNECT by answer.
func proxy(t *testing.T, answer func(conn net.Conn, q *http.Request)) (at string, asked *atomic.Int64) {
	t.Helper()
	asked = new(atomic.Int64)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		asked.Add(1)
		if q.Method != http.MethodConnect {
			t.Errorf("%s %s", q.Method, q.URL)
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		answer(conn, q)
	}))
	t.Cleanup(srv.Close)
	return srv.URL, asked
}

// tunnel connects as asked.
func tunnel(conn net.Conn, q *http.Request) {
	far, err := net.Dial("tcp", q.Host)
	if err != nil {
		_ = conn.Close()
		return
	}
	_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
	go pass(far, conn)
	pass(conn, far)
}

func TestProxyOfTheEnvironment(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	at, asked := proxy(t, tunnel)
	t.Setenv("HTTPS_PROXY", at)
	for noProxy, want := range map[string]int64{"": 2, "hub.example": 0} { // the bundle, then the link
		t.Setenv("NO_PROXY", noProxy)
		asked.Store(0)
		env := NewDialer(DialOptions{}).o.Proxy
		host, agent := r.connect(r.dialer(func(o *DialOptions) {
			o.Proxy = func(u *url.URL) (*url.URL, error) { // the environment's is never for the loopback
				return env(&url.URL{Scheme: u.Scheme, Host: "hub.example"})
			}
		}))
		carry(t, host, agent, []byte("hello"))
		if got := asked.Load(); got != want {
			t.Errorf("NO_PROXY=%q: %d requests, want %d", noProxy, got, want)
		}
		_, _ = host.Close(), agent.Close()
	}
}

func TestProxyThatRefuses(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	at, _ := proxy(t, func(conn net.Conn, _ *http.Request) {
		_, _ = io.WriteString(conn, "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n")
		_ = conn.Close()
	})
	through := func(text string) func(*DialOptions) {
		return func(o *DialOptions) { o.Proxy = func(*url.URL) (*url.URL, error) { return url.Parse(text) } }
	}
	r.refuses(t, "Proxy Authentication Required", through(at))
	r.refuses(t, "want http:// or socks5://", through("https://user:secret@127.0.0.1:1"))
}

func TestProxyThatHangs(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	held := make(chan net.Conn, 1)
	at, _ := proxy(t, func(conn net.Conn, _ *http.Request) { held <- conn })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := r.dialer(func(o *DialOptions) {
			guarded(t, o)
			o.Proxy = func(*url.URL) (*url.URL, error) { return url.Parse(at) }
		}).Dial(ctx)
		done <- err
	}()
	conn := wait.For(t, "the proxy is asked", held)
	cancel() // as the limits of a dial do: fetchTime and dialTime
	if err := <-done; err == nil {
		t.Error("connected")
	}
	_ = conn.Close()
}

// Answers that are no bundle, or no WebSocket.
func TestHostileServers(t *testing.T) {
	ca := newAuthority(t, "test")
	r := start(t, ca, nil)
	for name, tt := range map[string]struct {
		answer func(w http.ResponseWriter, q *http.Request)
		want   string
	}{
		"endless bundle": {func(w http.ResponseWriter, _ *http.Request) {
			for b := make([]byte, 64<<10); ; {
				if _, err := w.Write(b); err != nil {
					return
				}
			}
		}, "more than 1048576 bytes"},
		"redirection": {func(w http.ResponseWriter, q *http.Request) {
			http.Redirect(w, q, "https://"+r.at+pathBundle, http.StatusFound)
		}, "302 Found"},
		"no WebSocket": {func(w http.ResponseWriter, q *http.Request) {
			if q.URL.Path == pathBundle {
				_, _ = w.Write(r.server.bundle)
			}
		}, "the server answers 200"},
	} {
		t.Run(name, func(t *testing.T) {
			srv := httptest.NewUnstartedServer(http.HandlerFunc(tt.answer))
			srv.TLS = r.server.tlsConfig()
			srv.StartTLS()
			defer srv.Close()
			_, port, _ := net.SplitHostPort(srv.Listener.Addr().String())
			r.refuses(t, tt.want, func(o *DialOptions) { o.Server = "localhost:" + port })
		})
	}
}

// Connections that prove nothing make room for others.
func TestSilentConnectionsBlockNoOther(t *testing.T) {
	r := start(t, newAuthority(t, "test"), func(o *ServerOptions) { o.maxUnproved = 4 })
	for range 3 * r.server.limit {
		c, err := net.Dial("tcp", r.ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
	}
	host, agent := r.connect(r.dialer(nil))
	carry(t, host, agent, []byte("hello"))
	r.server.mu.Lock()
	defer r.server.mu.Unlock()
	if n := len(r.server.unproved); n > r.server.limit {
		t.Errorf("%d connections wait", n)
	}
}
