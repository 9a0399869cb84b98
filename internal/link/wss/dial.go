// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/net/http/httpproxy"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	dialTime   = 30 * time.Second // for one attempt, with proxy, TLS and handshake
	fetchTime  = 10 * time.Second // for the bundle
	maxBundle  = 1 << 20          // bytes
	maxReason  = 512              // bytes of a server's refusal
	minPause   = time.Second
	maxPause   = 30 * time.Second
	maxHeaders = 16 << 10 // bytes of an answer
)

var errInternal = errors.New("internal error")

// DialOptions configure a Dialer. Link, Server and Name are required.
type DialOptions struct {
	Link link.Options
	// Server is HOST or HOST:PORT.
	Server string
	// Name is that of this guest on the host.
	Name string
	// Pin, if not zero, is that of the bundle with the server's roots. Without, the
	// system's roots count.
	Pin Pin
	// CertFile and KeyFile, if not empty, hold the certificate that proves this guest.
	// They are read for each attempt.
	CertFile, KeyFile string
	// Proxy returns the proxy for a URL, nil for none. A nil Proxy means that of the
	// environment: HTTPS_PROXY and NO_PROXY.
	Proxy func(*url.URL) (*url.URL, error)

	dial dialFunc // that of package net if nil
}

type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// Dialer makes sessions with one server. It is safe for concurrent use.
type Dialer struct {
	o DialOptions

	mu    sync.Mutex
	roots *x509.CertPool // of the bundle that matched the pin, nil before
}

// NewDialer returns a dialer. It starts nothing.
func NewDialer(o DialOptions) *Dialer {
	if o.Proxy == nil {
		o.Proxy = httpproxy.FromEnvironment().ProxyFunc()
	}
	if o.dial == nil {
		o.dial = new(net.Dialer).DialContext
	}
	return &Dialer{o: o}
}

// NewRedialer returns what hands out one session after another, with pauses of up to
// 1 to 30 s, each of them a random part of that: many agents that lost a server do not
// return at once.
func NewRedialer(o DialOptions) *link.Redialer {
	log := o.Link.Logger.With("endpoint", "wss://"+o.Server+"/"+o.Name)
	return link.NewRedialerOf(NewDialer(o).Dial, schedule.Backoff{Min: minPause, Max: maxPause, Jitter: 1}, log)
}

// Dial makes a session. The server is verified before anything is sent to it, except
// for the request for the bundle if there is a pin.
func (d *Dialer) Dial(ctx context.Context) (link.Session, error) {
	s, err := d.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("dial link wss://%s/%s: %w", d.o.Server, d.o.Name, err)
	}
	return s, nil
}

func (d *Dialer) dial(ctx context.Context) (link.Session, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	roots, err := d.trusted(ctx)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots}
	proof := ""
	if d.o.CertFile != "" {
		own, err := tls.LoadX509KeyPair(d.o.CertFile, d.o.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("certificate of this guest: %w", err)
		}
		config.Certificates = []tls.Certificate{own}
		proof = "certificate " + d.o.Server
	}
	client, transport := d.client(config)
	stop := context.AfterFunc(ctx, transport.closeConns)
	at := "wss://" + d.o.Server + pathLink + url.PathEscape(d.o.Name)
	ws, answer, err := websocket.Dial(ctx, at, &websocket.DialOptions{ //nolint:bodyclose // the WebSocket's, or in memory
		HTTPClient: client, Subprotocols: []string{protocol}, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		transport.CloseIdleConnections()
		return nil, dialError(answer, err)
	}
	c, err := newConn(ws, transport.cork, address(d.o.Server), answer.TLS, proof)
	if err != nil {
		return nil, errors.Join(err, ws.CloseNow())
	}
	s, err := link.Client(ctx, c, d.o.Link)
	if err == nil {
		stop()
	}
	return s, err
}

// dialError adds what the server answered.
func dialError(answer *http.Response, err error) error {
	if answer == nil || answer.StatusCode == http.StatusSwitchingProtocols {
		return unwrapURL(err)
	}
	b, _ := io.ReadAll(io.LimitReader(answer.Body, maxReason))
	if text := strings.TrimSpace(string(b)); text != "" {
		return fmt.Errorf("the server answers %s: %q", answer.Status, text)
	}
	return fmt.Errorf("the server answers %s", answer.Status)
}

// unwrapURL leaves out what the caller adds: method and URL.
func unwrapURL(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

// trusted returns the roots for the server; nil means the system's.
func (d *Dialer) trusted(ctx context.Context) (*x509.CertPool, error) {
	if d.o.Pin.IsZero() {
		return nil, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.roots != nil { // the pin is that of one bundle: it cannot have changed
		return d.roots, nil
	}
	bundle, err := d.fetch(ctx)
	if err != nil {
		return nil, fmt.Errorf("fetch the CA bundle: %w", unwrapURL(err))
	}
	if !d.o.Pin.matches(bundle) {
		return nil, fmt.Errorf("the CA bundle of https://%s%s has the SHA-256 %s: want the pin %s", d.o.Server, pathBundle, PinOf(bundle), d.o.Pin)
	}
	list, err := certificates(bundle)
	if err != nil {
		return nil, fmt.Errorf("the CA bundle: %w", err)
	}
	d.roots = poolOf(list)
	return d.roots, nil
}

// fetch gets the bundle without verifying the server: the pin decides. Nothing secret
// is sent.
func (d *Dialer) fetch(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTime)
	defer cancel()
	client, transport := d.client(&tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true}) //nolint:gosec // checked by its hash
	defer transport.CloseIdleConnections()
	context.AfterFunc(ctx, transport.closeConns)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+d.o.Server+pathBundle, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the server answers %s", resp.Status)
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxBundle+1))
	if err == nil && len(b) > maxBundle {
		err = fmt.Errorf("more than %d bytes", maxBundle)
	}
	return b, err
}

// client returns an HTTP client that follows no redirection, for one request.
func (d *Dialer) client(config *tls.Config) (*http.Client, *corkTransport) {
	config.NextProtos, config.DynamicRecordSizingDisabled = []string{"http/1.1"}, true
	t := &corkTransport{}
	t.Transport = &http.Transport{
		DialContext: t.dialer(d.o.dial), Proxy: d.proxy, TLSClientConfig: config, DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxHeaders,
	}
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}, t
}

// proxy returns the proxy for a request. One that is reached over TLS is refused: it
// would be verified as the server is, so by the pinned roots or not at all.
func (d *Dialer) proxy(r *http.Request) (*url.URL, error) {
	u, err := d.o.Proxy(r.URL)
	if err != nil || u == nil {
		return nil, err
	}
	if u.Scheme != "http" && u.Scheme != "socks5" && u.Scheme != "socks5h" {
		return nil, fmt.Errorf("proxy %s: want http:// or socks5://", u.Redacted())
	}
	return u, nil
}
