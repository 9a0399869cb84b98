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
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	maxList  = 32 << 20 // bytes of a list; 10,000 entries have 1 MB
	maxError = 4 << 10
)

// The addresses that the peers reserve for their guest and for themselves.
var (
	defaultGuest = netip.MustParseAddr("192.168.127.2")
	defaultPeer  = netip.MustParseAddr("192.168.127.1")
)

// DefaultURLs returns the usual URLs of a gvisor-tap-vsock forwarder: those of the
// names that Rancher Desktop and Podman machine give it, if /etc/hosts has them, and of
// its usual address. DNS is not asked: who answers could be any machine.
func DefaultURLs() []string {
	var out []string
	for _, name := range []string{"gateway.rancher-desktop.internal", "gateway.containers.internal"} {
		for _, a := range peer.HostsFile("/", name) {
			if u := "http://" + netip.AddrPortFrom(a, 80).String(); a.Is4() && !slices.Contains(out, u) {
				out = append(out, u)
			}
		}
	}
	if u := "http://" + netip.AddrPortFrom(defaultPeer, 80).String(); !slices.Contains(out, u) {
		out = append(out, u)
	}
	return out
}

// dialFunc is net.Dialer's DialContext.
type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// api is the forwarder's API at one address, over one connection at a time.
type api struct {
	text    string // the URL without parameters
	base    string // what requests go to
	client  *http.Client
	timeout time.Duration
	ended   schedule.Signal // notifies of the end of a connection

	guest, peer   netip.Addr // as configured, or zero
	mu            sync.Mutex
	local, remote netip.Addr // of the last connection

	noName   error // the host name does not exist, as of noNameAt; only for Run's goroutine
	noNameAt time.Time
}

// namePause is the time between look-ups of a name that does not exist.
const namePause = 10 * time.Second

// unknown returns the error of a host name that did not exist a short while ago, so
// that name servers are asked less often than the peer is tried.
func (a *api) unknown(now time.Time) error {
	if a.noName != nil && now.Sub(a.noNameAt) < namePause {
		return a.noName
	}
	return nil
}

// newAPI parses http://HOST[:PORT] or unix:///PATH, both with the optional parameters
// guest=ADDRESS, the guest's address as the peer knows it, and peer=ADDRESS, from which
// the peer connects.
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
		set, ok := map[string]*netip.Addr{"guest": &a.guest, "peer": &a.peer}[k]
		if !ok {
			return nil, fmt.Errorf("gvproxy: %q: parameter %q: want guest or peer", text, k)
		}
		if *set, err = netip.ParseAddr(query.Get(k)); err != nil || !set.Is4() {
			return nil, fmt.Errorf("gvproxy: %q: %s %q: want an IPv4 address", text, k, query.Get(k))
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
			// One connection, which is kept open: it ends when the peer does.
			MaxConnsPerHost: 1, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return a, nil
}

// note remembers the addresses of a connection.
func (a *api) note(c net.Conn) {
	local, ok := c.LocalAddr().(*net.TCPAddr)
	remote, rok := c.RemoteAddr().(*net.TCPAddr)
	if !ok || !rok {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.local, a.remote = local.AddrPort().Addr().Unmap(), remote.AddrPort().Addr().Unmap()
}

// peerAddr returns the address from which the peer connects: as configured, or else
// the one at which it serves its API, or the guest's router where that is a unix socket.
func (a *api) peerAddr() netip.Addr {
	if a.peer.IsValid() {
		return a.peer
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.remote.Is4() {
		return a.remote
	}
	if router := peer.DefaultGateway("/"); router.IsValid() {
		return router
	}
	return defaultPeer
}

// guestAddr returns the guest's address as the peer knows it: as configured, or
// else the local address of the connection.
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

// watchedConn notifies when it is closed, which the transport does as soon as the
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

// refusal is an error that the peer answered.
type refusal struct {
	status int
	text   string
}

func (e *refusal) Error() string {
	return fmt.Sprintf("answered %d: %s", e.status, cmp.Or(e.text, http.StatusText(e.status)))
}

// call makes one request. An error that is no *refusal means that the peer does not
// work.
func (a *api) call(ctx context.Context, method, path string, body any, limit int64) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	bound := context.WithTimeout
	if body != nil { // a change must not be interrupted
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
	// All calls are idempotent. This empty key, which is not sent, has the transport
	// try again where the peer had just ended the connection.
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

// firstLine returns as much of an answer as a reason can hold.
func firstLine(b []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	line = strings.ToValidUTF8(strings.TrimSpace(line), "?")
	if len(line) > 200 {
		line = strings.ToValidUTF8(line[:200], "") + "..."
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, line)
}

// forward is one entry of the peer's list.
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
	return decodeForwards(b)
}

func decodeForwards(b []byte) ([]forward, error) {
	var all []forward
	if err := json.Unmarshal(b, &all); err != nil || all == nil {
		return nil, fmt.Errorf("answered no list of forwards: %q", firstLine(b[:min(len(b), 60)]))
	}
	return all, nil
}

// The protocol is always given: the peer would take a missing one for tcp.

func (a *api) expose(ctx context.Context, p port.Protocol, local, remote string) error {
	_, err := a.call(ctx, http.MethodPost, "/services/forwarder/expose", forward{local, remote, p.String()}, maxError)
	return err
}

func (a *api) unexpose(ctx context.Context, p port.Protocol, local string) error {
	_, err := a.call(ctx, http.MethodPost, "/services/forwarder/unexpose", forward{Local: local, Protocol: p.String()}, maxError)
	return err
}
