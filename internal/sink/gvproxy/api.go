// SPDX-License-Identifier: Apache-2.0

package gvproxy

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/sink/peer"
)

const (
	maxList  = 32 << 20 // bytes of a list; 10,000 entries have 1 MB
	maxError = 4 << 10
)

// defaultGuest is the address that the peers reserve for their guest.
var defaultGuest = netip.MustParseAddr("192.168.127.2")

// DefaultURLs returns where the forwarder of a gvisor-tap-vsock is looked for:
// Rancher Desktop's, its older address, and Podman machine's.
func DefaultURLs() []string {
	return []string{
		"http://gateway.rancher-desktop.internal:80",
		"http://192.168.127.1:80",
		"http://gateway.containers.internal",
	}
}

// dialFunc is net.Dialer's DialContext.
type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// api is the forwarder's API at one address, over one connection at a time.
type api struct {
	text    string // the URL, for people
	base    string // what requests go to
	client  *http.Client
	timeout time.Duration
	ended   schedule.Signal // receives when a connection ended

	guest netip.Addr // if it is configured
	mu    sync.Mutex
	local netip.Addr // our end of the connection

	noName   error // there is no such host, found at noNameAt; of Run's goroutine
	noNameAt time.Time
}

// namePause is between questions for a name that does not exist.
const namePause = 10 * time.Second

// unknown returns the error of a host that was found not to exist a short while
// ago: name servers are not asked at the pace of a peer that is away.
func (a *api) unknown(now time.Time) error {
	if a.noName != nil && now.Sub(a.noNameAt) < namePause {
		return a.noName
	}
	return nil
}

// newAPI reads http://HOST[:PORT] or unix:///PATH, both with an optional
// ?guest=ADDRESS: where the peer finds the guest.
func newAPI(text string, dial dialFunc, timeout time.Duration) (*api, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("gvproxy: %w", err)
	}
	a := &api{timeout: timeout, ended: schedule.NewSignal()}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return nil, fmt.Errorf("gvproxy: %q: %w", text, err)
	}
	for k := range query {
		if k != "guest" {
			return nil, fmt.Errorf("gvproxy: %q: parameter %q: want guest", text, k)
		}
	}
	if g := query.Get("guest"); g != "" {
		if a.guest, err = netip.ParseAddr(g); err != nil || !a.guest.Is4() {
			return nil, fmt.Errorf("gvproxy: %q: guest %q: want an IPv4 address", text, g)
		}
	}
	u.RawQuery = ""
	a.text = u.String()
	network, address := "", ""
	switch {
	case u.Scheme == "http" && u.Host != "" && strings.Trim(u.Path, "/") == "":
		a.base = "http://" + u.Host
	case u.Scheme == "unix" && u.Host == "" && strings.HasPrefix(u.Path, "/"):
		a.base, network, address = "http://unix", "unix", u.Path
	default:
		return nil, fmt.Errorf("gvproxy: %q: want http://HOST[:PORT] or unix:///PATH", text)
	}
	a.client = &http.Client{
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, n, addr string) (net.Conn, error) {
				c, err := dial(ctx, cmp.Or(network, n), cmp.Or(address, addr))
				if err != nil {
					return nil, err
				}
				a.note(c)
				return &watchedConn{Conn: c, ended: a.ended}, nil
			},
			// One connection, which is kept: its end tells that the peer went.
			MaxConnsPerHost: 1, DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return a, nil
}

// note remembers our end of a connection.
func (a *api) note(c net.Conn) {
	t, ok := c.LocalAddr().(*net.TCPAddr)
	if !ok {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.local = t.AddrPort().Addr().Unmap()
}

// guestAddr is where the peer finds the guest: as configured, or else the
// address that the guest itself speaks from.
func (a *api) guestAddr() netip.Addr {
	if a.guest.IsValid() {
		return a.guest
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.local.Is4() && !a.local.IsLoopback() {
		return a.local
	}
	return defaultGuest
}

func (a *api) close() { a.client.CloseIdleConnections() }

// watchedConn tells when it is closed, which the transport does as soon as the
// peer ends it.
type watchedConn struct {
	net.Conn
	ended schedule.Signal
	once  atomic.Bool
}

func (c *watchedConn) Close() error {
	if !c.once.Swap(true) {
		c.ended.Notify()
	}
	return c.Conn.Close()
}

// refusal is the peer's own no.
type refusal struct {
	status int
	text   string
}

func (e *refusal) Error() string {
	return fmt.Sprintf("answered %d: %s", e.status, cmp.Or(e.text, http.StatusText(e.status)))
}

// call makes one request. An error is a *refusal, or the peer does not work.
func (a *api) call(ctx context.Context, method, path string, body any, limit int64) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	bound := context.WithTimeout
	if body != nil { // it changes something
		bound = peer.Through
	}
	cctx, cancel := bound(ctx, a.timeout)
	defer cancel()
	var in []byte
	if body != nil {
		var err error
		if in, err = json.Marshal(body); err != nil {
			return nil, err
		}
	}
	req, err := http.NewRequestWithContext(cctx, method, a.base+path, bytes.NewReader(in))
	if err != nil {
		return nil, err
	}
	// All calls may be made twice. An empty key says so to the transport, which
	// then tries again on a connection that the peer had just ended; it is not sent.
	req.Header["Idempotency-Key"] = nil
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := a.client.Do(req)
	var out []byte
	if err == nil {
		out, err = io.ReadAll(io.LimitReader(resp.Body, limit+1))
		_ = resp.Body.Close()
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil && errors.Is(cctx.Err(), context.DeadlineExceeded):
		return nil, fmt.Errorf("no answer within %v", a.timeout)
	case err != nil:
		return nil, peer.Cause(err)
	case resp.StatusCode != http.StatusOK:
		return nil, &refusal{resp.StatusCode, firstLine(out)}
	case int64(len(out)) > limit:
		return nil, fmt.Errorf("answered more than %d bytes", limit)
	}
	return out, nil
}

// firstLine is what of an answer fits into a reason.
func firstLine(b []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	line = strings.ToValidUTF8(strings.TrimSpace(line), "?")
	if len(line) > 200 {
		line = line[:200] + "..."
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, line)
}

// forward is one entry as the peer has it.
type forward struct {
	Local    string `json:"local"`
	Remote   string `json:"remote,omitempty"`
	Protocol string `json:"protocol"`
}

func (a *api) list(ctx context.Context) ([]forward, error) {
	b, err := a.call(ctx, http.MethodGet, "/services/forwarder/all", nil, maxList)
	a.noName = nil
	if err != nil {
		var dns *net.DNSError
		if errors.As(err, &dns) && dns.IsNotFound {
			a.noName, a.noNameAt = fmt.Errorf("no host is named %s", dns.Name), time.Now()
			return nil, a.noName
		}
		return nil, err
	}
	var all []forward
	if err := json.Unmarshal(b, &all); err != nil || all == nil {
		return nil, fmt.Errorf("answered with what is no list of forwards: %q", firstLine(b[:min(len(b), 60)]))
	}
	return all, nil
}

// The protocol is always named: the peer would take a missing one for tcp.

func (a *api) expose(ctx context.Context, p port.Protocol, local, remote string) error {
	_, err := a.call(ctx, http.MethodPost, "/services/forwarder/expose", forward{local, remote, p.String()}, maxError)
	return err
}

func (a *api) unexpose(ctx context.Context, p port.Protocol, local string) error {
	_, err := a.call(ctx, http.MethodPost, "/services/forwarder/unexpose", forward{Local: local, Protocol: p.String()}, maxError)
	return err
}
