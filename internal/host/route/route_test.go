// SPDX-License-Identifier: Apache-2.0

package route

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/names"
	"github.com/fairlead/fairlead/internal/port/table"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/output"
	freeports "github.com/fairlead/fairlead/internal/testkit/ports"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestMain(m *testing.M) { leak.Main(m) }

// fake is a host whose publications are servers of the test.
type fake struct {
	table *table.Table[host.ID, host.Row]

	mu      sync.Mutex
	servers map[host.ID]string
	refusal error // what all connections get
	reached []host.Reach
}

func newFake() *fake {
	return &fake{table: table.New[host.ID, host.Row](host.ID.Compare), servers: make(map[host.ID]string)}
}

func (f *fake) View() host.View { return f.table.View() }

// Guests returns those of this package's tests.
func (f *fake) Guests() []host.GuestStatus { return []host.GuestStatus{{Name: "vm"}, {Name: "away"}} }

func (f *fake) Listen(ctx context.Context, at netip.AddrPort) (net.Listener, error) {
	return new(net.ListenConfig).Listen(ctx, "tcp4", at.String())
}

// put publishes a port of a container, which a server at an address serves.
func (f *fake) put(guest, name string, n uint16, server string) host.ID {
	id := host.ID{Guest: guest, Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n}}
	f.mu.Lock()
	f.servers[id] = server
	f.mu.Unlock()
	f.set(host.Row{
		Guest: guest, Fact: &port.Fact{Key: id.Key, Owner: port.Owner{Kind: port.OwnerContainer, ID: "id of " + name, Name: name}},
		Outcomes: []port.Outcome{{State: port.Active, HostAddress: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), n)}},
	})
	return id
}

func (f *fake) set(p host.Row) {
	f.table.Update(func(tx *table.Tx[host.ID, host.Row]) { tx.Put(p.ID(), p) })
}

func (f *fake) Reachable(r host.Reach) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !r.At.Addr().IsLoopback() {
		return errors.New("not so wide")
	}
	return f.refusal
}

// stream is a connection to a server of the test, as a link has it.
type stream struct{ *net.TCPConn }

func (s stream) Reset() error {
	forward.Reset(s.TCPConn)
	return nil
}

func (f *fake) Dial(ctx, _ context.Context, r host.Reach) (link.Stream, error) {
	if err := f.Reachable(r); err != nil {
		return nil, err
	}
	f.mu.Lock()
	f.reached = append(f.reached, r)
	server := f.servers[r.ID]
	f.mu.Unlock()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", server)
	if err != nil {
		return nil, err
	}
	return stream{conn.(*net.TCPConn)}, nil
}

func (f *fake) Carry(ctx context.Context, conn net.Conn, first []byte, r host.Reach) error {
	to, err := f.Dial(ctx, ctx, r)
	if err != nil {
		forward.Reset(conn)
		return fmt.Errorf("%w: %w", host.ErrNotReached, err)
	}
	_, _ = to.Write(first)
	return forward.Splice(ctx, conn, to, nil)
}

// serve runs a router with one listener of each kind, and returns their addresses.
func serve(t *testing.T, f *fake, change ...func(*Options)) (r *Router, web, secure netip.AddrPort) {
	t.Helper()
	opt := Options{
		Host: f, Domain: names.Local, Logger: slog.New(slog.DiscardHandler),
		HTTP: []netip.AddrPort{free(t)}, TLS: []netip.AddrPort{free(t)}, HeaderTimeout: wait.Limit(),
	}
	for _, f := range change {
		f(&opt)
	}
	r = New(opt)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	wait.Until(t, "both listen", func() error {
		if n := r.Stats().Listened; n != len(r.places) {
			return fmt.Errorf("%d listen: %+v", n, r.Report().Listeners)
		}
		return nil
	})
	if len(opt.TLS) > 0 {
		secure = opt.TLS[0]
	}
	return r, opt.HTTP[0], secure
}

// free returns a free address.
func free(t *testing.T) netip.AddrPort {
	t.Helper()
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), freeports.Free(t))
}

// client connects to an address whatever the URL says.
func client(t *testing.T, to netip.AddrPort) *http.Client {
	t.Helper()
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", to.String())
	}, DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: wait.Limit(), CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// dial connects to a listener.
func dial(t *testing.T, at fmt.Stringer) *net.TCPConn {
	t.Helper()
	conn, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(wait.Limit()))
	return conn.(*net.TCPConn)
}

// published publishes a server of HTTP as web.localhost, and returns the router and its listener.
func published(t *testing.T, serves http.HandlerFunc, change ...func(*Options)) (r *Router, web netip.AddrPort) {
	t.Helper()
	f := newFake()
	f.serve(t, serves)
	r, web, _ = serve(t, f, change...)
	return r, web
}

// serve publishes a server of HTTP as web.localhost.
func (f *fake) serve(t *testing.T, serves http.HandlerFunc) {
	s := httptest.NewServer(serves)
	t.Cleanup(s.Close)
	f.put("vm", "web", 80, s.Listener.Addr().String())
}

func get(t *testing.T, c *http.Client, url string) (code int, body string, h http.Header) {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Fatalf("%s: %v", url, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s: %v", url, err)
	}
	return resp.StatusCode, string(b), resp.Header
}

// answer reads the answer to a request.
func answer(t *testing.T, r *bufio.Reader) (code int, body string) {
	t.Helper()
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// server answers with its name, the Host and the path that it got.
func server(t *testing.T, name string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		fmt.Fprintf(w, "%s %s %s", name, q.Host, q.RequestURI)
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// One connection may carry requests for several names; each is led by its own Host.
func TestEachRequestIsLedByItsHost(t *testing.T) {
	f := newFake()
	f.put("vm", "web", 8080, server(t, "web"))
	f.put("vm", "api", 9000, server(t, "api"))
	f.put("vm", "api", 9001, server(t, "api2"))
	f.put("vm", "proxy", 80, server(t, "proxy"))
	f.put("vm", "proxy", 443, server(t, "tls"))
	evil := f.put("vm", "evil", 1, server(t, "evil"))
	p, _ := f.View().Get(evil)
	p.Owner.Labels = map[string]string{"com.docker.compose.project": "away", "com.docker.compose.service": "page"}
	f.set(p)
	_, at, _ := serve(t, f)
	conn := dial(t, at)
	r := bufio.NewReader(conn)
	for _, c := range []struct{ host, path, want string }{
		{"web.localhost:8000", "/a%2Fb//c?x=;%zz&y", "web web.localhost:8000 /a%2Fb//c?x=;%zz&y"},
		{"9001.api.localhost", "/", "api2 9001.api.localhost /"},
		{"API.vm.localhost.", "/", "several ports"},
		{"9000.API.vm.localhost.", "/?", "api 9000.API.vm.localhost. /?"},
		{"proxy.localhost", "/", "proxy proxy.localhost /"},
		{"page.away.localhost", "/", "Nothing that is published"}, // of a guest that is not connected
		{"8080.web.localhost", "/", "web 8080.web.localhost /"},
	} {
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n", c.path, c.host)
		if code, body := answer(t, r); !strings.Contains(body, c.want) {
			t.Errorf("%s: %d %q, want %q", c.host, code, body, c.want)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.reached {
		if !r.Peer.Addr().IsLoopback() || r.Peer.Port() == 0 || !r.At.Addr().IsLoopback() {
			t.Errorf("reached as %+v", r)
		}
	}
}

func TestURL(t *testing.T) {
	r, web, _ := serve(t, newFake())
	if got, want := r.URL("web.localhost", 80), fmt.Sprintf("http://web.localhost:%d", web.Port()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	r = New(Options{Host: newFake(), Domain: names.Local, Logger: slog.New(slog.DiscardHandler), TLS: []netip.AddrPort{free(t)}})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	defer func() { cancel(); running.Wait() }()
	wait.Until(t, "it listens", func() error {
		if r.Stats().Listened == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	if got := r.URL("web.localhost", 80); !strings.HasPrefix(got, "https://web.localhost:") {
		t.Error(got)
	}
	if got := New(Options{Host: newFake(), Domain: "localhost", HTTP: []netip.AddrPort{web}, Logger: slog.New(slog.DiscardHandler)}).URL("web.localhost", 80); got != "" {
		t.Errorf("%s, and nothing is open", got)
	}
}

// The URL of a name below localhost is at a listener that localhost leads to.
func TestURLLeadsToTheListener(t *testing.T) {
	for _, c := range []struct {
		domain, http, tls string // the open listeners
		want, list        string
	}{
		{"localhost", "127.0.0.1:80", "", "http://web.localhost", "http://localhost"},
		{"localhost", "[::1]:8000", "", "http://web.localhost:8000", "http://localhost:8000"},
		{"localhost", "0.0.0.0:80", "", "http://web.localhost", "http://localhost"},
		{"localhost", "[::]:81", "", "http://web.localhost:81", "http://localhost:81"},
		{"localhost", "192.168.1.5:80", "", "", ""},
		{"localhost", "127.0.0.2:80", "", "", ""},
		{"localhost", "192.168.1.5:80 127.0.0.1:8000", "", "http://web.localhost:8000", "http://localhost:8000"},
		{"localhost", "192.168.1.5:80", "127.0.0.1:443", "https://web.localhost", ""},
		{"localhost", "", "192.168.1.5:443 [::1]:8443", "https://web.localhost:8443", ""},
		{"vm.localhost", "192.168.1.5:80", "", "", ""},
		{"vm.test", "192.168.1.5:80", "", "http://web.vm.test", ""},
		{"vm.test", "192.168.1.5:8000 127.0.0.1:80", "", "http://web.vm.test:8000", "http://localhost"},
	} {
		opt := Options{Host: newFake(), Domain: c.domain, Logger: slog.New(slog.DiscardHandler)}
		for _, at := range strings.Fields(c.http) {
			opt.HTTP = append(opt.HTTP, netip.MustParseAddrPort(at))
		}
		for _, at := range strings.Fields(c.tls) {
			opt.TLS = append(opt.TLS, netip.MustParseAddrPort(at))
		}
		r := New(opt)
		changed, stop := r.Watch()
		for _, p := range r.places {
			r.note(p, "")
		}
		if got, list := r.URL("web."+c.domain, 8080), r.Report().URL; got != c.want || list != c.list {
			t.Errorf("%+v: %q, and the list at %q", c, got, list)
		}
		select {
		case <-changed:
		default:
			t.Errorf("%+v: nobody was told of the listeners", c)
		}
		stop()
		for _, p := range r.places {
			r.note(p, "gone")
		}
		if got, list := r.URL("web."+c.domain, 8080), r.Report().URL; got+list != "" || len(changed) > 0 {
			t.Errorf("%+v: %q, and the list at %q, and nothing is open; told: %d", c, got, list, len(changed))
		}
	}
}

// A name outside the domain is refused, and shows nothing; only localhost has the list.
func TestForeignNamesLearnNothing(t *testing.T) {
	f := newFake()
	f.put("vm", "secret-name", 8080, server(t, "web"))
	r, at, _ := serve(t, f)
	c := client(t, at)
	for url, want := range map[string]int{
		"http://evil.example/": 421, "http://evil.example/names.json": 421, "http://10.0.0.1/": 421, "http://localhost.evil.example/": 421,
		"http://other.localhost/": 404, "http://other.localhost/names.json": 404,
	} {
		code, body, h := get(t, c, url)
		if code != want || strings.Contains(body, "secret") {
			t.Errorf("%s: %d %q, want %d", url, code, body, want)
		}
		if h.Get("Access-Control-Allow-Origin") != "" || h.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: headers %v", url, h)
		}
	}
	for _, url := range []string{"http://localhost/", "http://127.0.0.1/", "http://[::1]/names.json"} {
		code, body, h := get(t, c, url)
		if code != 200 || !strings.Contains(body, "secret-name.localhost") {
			t.Errorf("%s: %d %q", url, code, body)
		}
		if p := h.Get("Content-Security-Policy"); !strings.HasPrefix(p, "default-src 'none'") || strings.Contains(p, "script") {
			t.Errorf("%s: policy %q", url, p)
		}
	}
	q, _ := http.NewRequest("GET", "http://localhost/names.json", nil)
	q.Header.Set("Sec-Fetch-Site", "same-site") // a page of web.localhost
	resp, err := c.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	if resp.Body.Close(); resp.StatusCode != 403 {
		t.Errorf("across sites: %d", resp.StatusCode)
	}
	if n := r.Stats().Results["foreign"]; n != 4 {
		t.Errorf("%d foreign", n)
	}
	conn := dial(t, at)
	fmt.Fprintf(conn, "CONNECT secret-name.localhost:80 HTTP/1.1\r\nHost: secret-name.localhost:80\r\n\r\n")
	if code, body := answer(t, bufio.NewReader(conn)); code != 405 {
		t.Errorf("CONNECT: %d %q", code, body)
	}
}

// Other machines reach what is open to them, and learn nothing else.
func TestOtherMachinesLearnNothing(t *testing.T) {
	f := newFake()
	f.put("vm", "web", 8080, server(t, "web"))
	f.put("build", "two", 8081, server(t, "two"))
	f.put("build", "two", 8082, server(t, "two"))
	r := New(Options{Host: f, Domain: names.Local, Logger: slog.New(slog.DiscardHandler)})
	far := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 80}
	for _, host := range []string{"web.localhost", "two.localhost", "localhost", "127.0.0.1", "none.localhost"} {
		q := httptest.NewRequest("GET", "/", nil).WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, net.Addr(far)))
		q.Host, q.RemoteAddr = host, "10.0.0.2:4000"
		w := httptest.NewRecorder()
		r.handle(t.Context(), w, q)
		if w.Code != 404 || strings.TrimSpace(w.Body.String()) != "Nothing that is published has this name." {
			t.Errorf("%s: %d %q", host, w.Code, w.Body)
		}
	}
}

// Names of owners are text in the page.
func TestPageEscapesNames(t *testing.T) {
	f := newFake()
	f.put("vm", `<script>alert(1)</script>"&'`, 8080, "")
	f.put(`<b>"guest`, "a", 8081, "")
	_, at, _ := serve(t, f)
	_, body, _ := get(t, client(t, at), "http://localhost/")
	for _, bad := range []string{"<script", "<b>", `"&'`} {
		if strings.Contains(body, bad) {
			t.Errorf("the page has %q:\n%s", bad, body)
		}
	}
	if !strings.Contains(body, `<a href="http://script-alert-1-script.localhost/">`) || !strings.Contains(body, "&lt;script&gt;") {
		t.Errorf("the page is %s", body)
	}
}

// The URL of port 443 is one of TLS, as is its link in the page.
func TestURLOfTLS(t *testing.T) {
	f := newFake()
	f.put("vm", "both", 80, "")
	f.put("vm", "both", 443, "")
	f.put("dev", "secure", 443, "")
	f.put("build", "two", 443, "")
	f.put("build", "two", 8080, "")
	r, at, secure := serve(t, f)
	if got, want := r.URL("both.localhost", 443), fmt.Sprintf("https://both.localhost:%d", secure.Port()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	_, body, _ := get(t, client(t, at), "http://localhost/")
	for _, want := range []string{
		`<a href="http://both.localhost/">both.localhost</a>`, `<a href="http://80.both.localhost/">80</a>`,
		fmt.Sprintf(`<a href="https://both.localhost:%d/">443</a>`, secure.Port()),
		fmt.Sprintf(`<a href="https://secure.localhost:%d/">secure.localhost</a>`, secure.Port()),
		fmt.Sprintf(`<a href="https://secure.localhost:%d/">443</a>`, secure.Port()),
	} {
		if !strings.Contains(body, want) {
			t.Errorf("no %s in\n%s", want, body)
		}
	}
	_, body, _ = get(t, client(t, at), "http://two.localhost/")
	for _, want := range []string{
		fmt.Sprintf(`<a href="https://two.localhost:%d/">443.two.localhost</a>`, secure.Port()),
		`<a href="http://8080.two.localhost/">8080.two.localhost</a>`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("no %s among the choices in\n%s", want, body)
		}
	}
	r, at, _ = serve(t, f, func(o *Options) { o.TLS = nil })
	if got := r.URL("both.localhost", 443); got != "" {
		t.Errorf("%s, and nothing serves TLS", got)
	}
	if _, body, _ := get(t, client(t, at), "http://localhost/"); strings.Contains(body, "https:") || strings.Contains(body, "http://secure") ||
		!strings.Contains(body, "<td>secure.localhost<br>secure.dev.localhost<td>443<td>") {
		t.Errorf("links that lead nowhere in\n%s", body)
	}
}

// What a name leads to follows what is published; what rules deny has no name.
func TestNamesFollowPublications(t *testing.T) {
	f := newFake()
	one := f.put("vm", "web", 8080, server(t, "one"))
	_, at, _ := serve(t, f)
	c := client(t, at)
	wants := func(what, text string, code int) {
		t.Helper()
		if got, body, _ := get(t, c, "http://web.localhost/"); got != code || !strings.Contains(body, text) {
			t.Errorf("%s: %d %q, want %d %q", what, got, body, code, text)
		}
	}
	wants("published", "one web.localhost", 200)
	f.put("other", "web", 8080, server(t, "two"))
	wants("two guests have it", "web.other.localhost", 409)
	p, _ := f.View().Get(one)
	p.Outcomes = []port.Outcome{{State: port.Denied}}
	f.set(p)
	wants("one is denied", "two web.localhost", 200)
	p.Outcomes = []port.Outcome{{State: port.Pending}}
	f.set(p)
	wants("one is pending", "two web.localhost", 200)
	p.Outcomes = []port.Outcome{{State: port.Conflict, HostAddress: at}}
	f.set(p)
	wants("its host port is in use", "web.vm.localhost", 409)
	p.OwnerPending = true
	f.set(p)
	wants("its owner is not certain", "two web.localhost", 200)
	f.table.Update(func(tx *table.Tx[host.ID, host.Row]) { tx.Delete(one) })
	f.mu.Lock()
	f.refusal = host.ErrDenied
	f.mu.Unlock()
	wants("denied since", "rules", 403)
	f.mu.Lock()
	f.refusal = errors.New("no link to the guest")
	f.mu.Unlock()
	wants("no link", "no link to the guest", 502)
}

// Headers pass as they came, in both directions.
func TestHeadersPass(t *testing.T) {
	got := make(chan http.Header, 1)
	_, at := published(t, func(w http.ResponseWriter, q *http.Request) {
		_, _ = io.Copy(io.Discard, q.Body)
		h := q.Header.Clone()
		h["Trailer-Got"] = q.Trailer["X-Sum"]
		got <- h
		w.Header().Set("Trailer", "X-End")
		w.Header().Set("Set-Cookie", "a=b")
		w.WriteHeader(http.StatusTeapot)
		w.Header().Set("X-End", "yes")
	})
	q, _ := http.NewRequest("POST", "http://web.localhost/", io.NopCloser(strings.NewReader("body")))
	q.Trailer = http.Header{"X-Sum": {"1"}}
	for h, v := range map[string]string{"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https", "Forwarded": "for=x", "Cookie": "c=d", "Te": "trailers", "Accept-Encoding": "zstd"} {
		q.Header.Set(h, v)
	}
	q.Header["User-Agent"] = []string{""}
	resp, err := client(t, at).Do(q)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusTeapot || resp.Header.Get("Set-Cookie") != "a=b" || resp.Trailer.Get("X-End") != "yes" {
		t.Errorf("the answer is %+v with %v", resp, resp.Trailer)
	}
	h := <-got
	for name, want := range map[string]string{"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "", "Forwarded": "for=x", "Cookie": "c=d", "Accept-Encoding": "zstd", "User-Agent": "", "Trailer-Got": "1"} {
		if h.Get(name) != want {
			t.Errorf("%s is %q, want %q", name, h.Get(name), want)
		}
	}
}

// Trailers pass, whether or not a header has announced them.
func TestTrailersPass(t *testing.T) {
	_, at := published(t, func(w http.ResponseWriter, q *http.Request) {
		_, err := io.Copy(io.Discard, q.Body)
		fmt.Fprint(w, q.Trailer["X-Sum"], q.Trailer["X-More"], err)
	})
	for _, announced := range []string{"", "Trailer: X-Sum\r\n", "Trailer: X-Sum, X-More\r\n"} {
		conn := dial(t, at)
		fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: web.localhost\r\nTransfer-Encoding: chunked\r\n%s\r\n1\r\nx\r\n0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n", announced)
		if code, body := answer(t, bufio.NewReader(conn)); body != "[1] [2] <nil>" {
			t.Errorf("%q: %d %q", announced, code, body)
		}
	}
}

// A server that answers while it still reads gets the whole body: what follows the beginning of
// the answer as well.
func TestAnswerBeforeTheEndOfTheBody(t *testing.T) {
	const part = "0123456789"
	f := newFake()
	echo := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.WriteHeader(http.StatusOK)
		for b := make([]byte, len(part)); ; {
			n, err := q.Body.Read(b)
			_, _ = w.Write(b[:n])
			_ = http.NewResponseController(w).Flush()
			if err != nil {
				return
			}
		}
	}))
	defer echo.Close()
	f.put("vm", "web", 80, echo.Listener.Addr().String())
	_, web, _ := serve(t, f)
	conn := dial(t, web)
	fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: web.localhost\r\nContent-Length: %d\r\n\r\n%s", 3*len(part), part)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatalf("no answer before the end of the body: %v", err)
	}
	defer resp.Body.Close()
	for i := range 3 {
		b := make([]byte, len(part))
		if _, err := io.ReadFull(resp.Body, b); err != nil || string(b) != part {
			t.Fatalf("part %d: %q, %v", i, b, err)
		}
		if i < 2 {
			_, _ = io.WriteString(conn, part)
		}
	}
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
		t.Errorf("then %q, %v", rest, err)
	}
}

// Events arrive while the answer goes on, and an upgraded connection moves both ways.
func TestStreamsAndUpgrades(t *testing.T) {
	_, at := published(t, func(w http.ResponseWriter, q *http.Request) {
		if q.Header.Get("Upgrade") == "" {
			_, _ = io.WriteString(w, "data: first\n\n")
			w.(http.Flusher).Flush()
			<-q.Context().Done() // the client has gone
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"))
		_, _ = io.Copy(conn, rw)
	})
	resp, err := client(t, at).Get("http://web.localhost/")
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	if line != "data: first\n" {
		t.Errorf("the first event is %q, %v", line, err)
	}
	_ = resp.Body.Close()

	conn := dial(t, at)
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: web.localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	r := bufio.NewReader(conn)
	if code, body := answer(t, r); code != 101 {
		t.Fatalf("upgrade: %d %q", code, body)
	}
	for range 3 {
		_, _ = conn.Write([]byte("ping\n"))
		if line, err := r.ReadString('\n'); line != "ping\n" {
			t.Fatalf("echo %q, %v", line, err)
		}
	}
}

// An answer that breaks off never looks complete.
func TestTruncatedAnswer(t *testing.T) {
	_, at := published(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "half")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	resp, err := client(t, at).Get("http://web.localhost/")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("%q looks complete", b)
	}
}

// Slow heads and silent connections hold up nobody; heads have a limit.
func TestSlowHeads(t *testing.T) {
	f := newFake()
	f.put("vm", "web", 8080, server(t, "web"))
	r, at, secure := serve(t, f)
	first := make(map[netip.AddrPort]net.Conn)
	for _, to := range []netip.AddrPort{at, secure} {
		for i := range maxSilent + 10 {
			conn := dial(t, to)
			_, _ = conn.Write([]byte("G\x03"[i%2 : i%2+1]))
			if i == 0 {
				first[to] = conn
			}
		}
	}
	if code, _, _ := get(t, client(t, at), "http://web.localhost/"); code != 200 {
		t.Errorf("beside slow heads: %d", code)
	}
	for to, conn := range first {
		if _, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the oldest at %s is open", to)
		}
	}
	q, _ := http.NewRequest("GET", "http://web.localhost/", nil)
	q.Header.Set("X-Long", strings.Repeat("a", 2*maxHeader))
	if resp, err := client(t, at).Do(q); err == nil {
		if resp.Body.Close(); resp.StatusCode != 431 {
			t.Errorf("a long head: %d", resp.StatusCode)
		}
	}
	if s := r.Stats(); s.HTTP == 0 {
		t.Errorf("%+v", s)
	}
}

func TestHeaderTimeout(t *testing.T) {
	f := newFake()
	_, at, secure := serve(t, f, func(o *Options) { o.HeaderTimeout = time.Millisecond })
	for _, to := range []netip.AddrPort{at, secure} {
		conn := dial(t, to)
		if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %v, want its end", to, err)
		}
	}
}

// The head of an answer has a limit: a server must not fill this machine's memory.
func TestLongAnswerHeads(t *testing.T) {
	f := newFake()
	for i, n := range []int{maxHeader / 2, 2 * maxHeader} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			for range n / 1024 {
				w.Header().Add("X-Long", strings.Repeat("a", 1024))
			}
		}))
		t.Cleanup(s.Close)
		f.put("vm", fmt.Sprintf("web%d", i), 8080+uint16(i), s.Listener.Addr().String())
	}
	r, at, _ := serve(t, f)
	for name, want := range map[string]int{"web0": http.StatusOK, "web1": http.StatusBadGateway} {
		if code, body, _ := get(t, client(t, at), "http://"+name+".localhost/"); code != want {
			t.Errorf("%s: %d %q, want %d", name, code, body, want)
		}
	}
	if got := r.Stats().Results["failed"]; got != 1 {
		t.Errorf("%d failed, want 1", got)
	}
}

// tlsServer answers over TLS with its name and the one that was asked for.
func tlsServer(t *testing.T, name string) (address string, roots *x509.CertPool) {
	t.Helper()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		fmt.Fprintf(w, "%s %s", name, q.TLS.ServerName)
	}))
	t.Cleanup(s.Close)
	roots = x509.NewCertPool()
	roots.AddCert(s.Certificate())
	return s.Listener.Addr().String(), roots
}

// slow writes each byte alone.
type slow struct{ net.Conn }

func (s slow) Write(b []byte) (int, error) {
	for i := range b {
		if _, err := s.Conn.Write(b[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(b), nil
}

func TestTLSIsLedByItsName(t *testing.T) {
	f := newFake()
	address, _ := tlsServer(t, "web")
	f.put("vm", "web", 8443, address)
	f.put("build", "two", 80, "")
	f.put("build", "two", 443, address)
	f.put("a", "twin", 443, address)
	f.put("b", "twin", 443, address)
	r, _, at := serve(t, f)
	ask := func(name string, wrap func(net.Conn) net.Conn) (string, error) {
		raw, err := net.Dial("tcp", at.String())
		if err != nil {
			t.Fatal(err)
		}
		defer raw.Close()
		_ = raw.SetDeadline(time.Now().Add(wait.Limit()))
		conn := tls.Client(wrap(raw), &tls.Config{ServerName: name, InsecureSkipVerify: true})
		fmt.Fprintf(conn, "GET / HTTP/1.0\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return string(b), err
	}
	plain := func(c net.Conn) net.Conn { return c }
	for name, want := range map[string]string{
		"web.localhost": "web web.localhost", "two.localhost": "web two.localhost", "443.twin.b.localhost": "web 443.twin.b.localhost",
	} {
		if got, err := ask(name, plain); got != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if got, err := ask("web.localhost", func(c net.Conn) net.Conn { return slow{c} }); got != "web web.localhost" {
		t.Errorf("byte by byte: %q, %v", got, err)
	}
	for name, result := range map[string]string{"none.localhost": "unknown", "twin.localhost": "ambiguous", "evil.example": "foreign", "": "foreign", "localhost": "foreign"} {
		before := r.Stats().Results[result]
		_, err := ask(name, plain)
		var alert tls.AlertError
		if !errors.As(err, &alert) && (err == nil || !strings.Contains(err.Error(), "unrecognized name")) {
			t.Errorf("%q: %v, want an alert", name, err)
		}
		if r.Stats().Results[result] != before+1 {
			t.Errorf("%q: %v, want one more %s", name, r.Stats().Results, result)
		}
	}
}

// hello returns the first message of a TLS client.
func hello(t testing.TB, c *tls.Config) []byte {
	t.Helper()
	near, far := net.Pipe()
	defer near.Close()
	go func() { _ = tls.Client(far, c).Handshake() }()
	head := make([]byte, 5)
	if _, err := io.ReadFull(near, head); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, int(head[3])<<8|int(head[4]))
	if _, err := io.ReadFull(near, body); err != nil {
		t.Fatal(err)
	}
	_ = far.Close()
	return append(head, body...)
}

// bytesConn is a connection that has sent some bytes.
type bytesConn struct {
	net.Conn
	r io.Reader
}

func (b bytesConn) Read(p []byte) (int, error) { return b.r.Read(p) }

// split puts what a record has into several, and appends more.
func split(record []byte, n int, more string) []byte {
	var out []byte
	for body := record[5:]; len(body) > 0; {
		part := body[:min(n, len(body))]
		body = body[len(part):]
		out = append(append(out, record[0], record[1], record[2], byte(len(part)>>8), byte(len(part))), part...)
	}
	return append(out, more...)
}

func TestHelloInSeveralRecords(t *testing.T) {
	for _, version := range []uint16{tls.VersionTLS10, tls.VersionTLS12, tls.VersionTLS13} {
		record := hello(t, &tls.Config{ServerName: "web.localhost", MinVersion: version, MaxVersion: version})
		for _, n := range []int{len(record), 100, 7} {
			sent := split(record, n, "more")
			name, first, err := readHello(bytesConn{r: bytes.NewReader(sent)})
			if err != nil || name != "web.localhost" {
				t.Errorf("TLS %x in records of %d: %q, %v", version, n, name, err)
			}
			if !bytes.HasPrefix(sent, first) || len(first) < len(sent)-len("more") {
				t.Errorf("%d of %d bytes are passed on", len(first), len(sent))
			}
		}
	}
}

func FuzzHello(f *testing.F) {
	record := hello(f, &tls.Config{ServerName: "web.localhost"})
	f.Add(record)
	f.Add(split(record, 9, ""))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		name, first, err := readHello(bytesConn{r: bytes.NewReader(b)})
		if err != nil && (name != "" || first != nil) {
			t.Fatalf("%q and %d bytes with %v", name, len(first), err)
		}
		if !bytes.HasPrefix(b, first) || len(first) > maxHeader {
			t.Fatalf("%d bytes of %d are passed on", len(first), len(b))
		}
	})
}

// A listener waits until its address is free, and says so.
func TestListenerWaitsForItsAddress(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := addrPort(ln.Addr())
	r := New(Options{
		Host: newFake(), Domain: names.Local, Logger: slog.New(slog.DiscardHandler), HTTP: []netip.AddrPort{at},
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	defer func() { cancel(); <-done }()
	wait.Until(t, "it says why", func() error {
		if l := r.Report().Listeners[0]; l.Open || !strings.Contains(l.Error, "in use") || !strings.Contains(l.Error, "--names") {
			return fmt.Errorf("%+v", l)
		}
		return nil
	})
	_ = ln.Close()
	wait.Until(t, "it listens", func() error {
		if l := r.Report().Listeners[0]; !l.Open || l.Error != "" {
			return fmt.Errorf("%+v", l)
		}
		return nil
	})
}

// Large bodies arrive whole, in both directions.
func TestLargeBodies(t *testing.T) {
	const size = 8 << 20
	_, at := published(t, func(w http.ResponseWriter, q *http.Request) {
		n, err := io.Copy(w, q.Body)
		if n != size || err != nil {
			t.Errorf("got %d, %v", n, err)
		}
	})
	resp, err := client(t, at).Post("http://web.localhost/", "", bytes.NewReader(bytes.Repeat([]byte("abcdefgh"), size/8)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if n, err := io.Copy(io.Discard, resp.Body); n != size || err != nil {
		t.Errorf("received %d, %v", n, err)
	}
}

// A header that the server does not send is not made up, whenever the body comes.
func TestNoContentTypeIsGuessed(t *testing.T) {
	_, at := published(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Content-Type"] = nil
		_, _ = io.WriteString(w, "<html>text</html>")
	})
	for range 20 {
		if _, _, h := get(t, client(t, at), "http://web.localhost/"); h["Content-Type"] != nil {
			t.Fatalf("Content-Type %q", h["Content-Type"])
		}
	}
}

// "OPTIONS *" is about a server, too, and is not answered for another one.
func TestOptionsOfForeignNames(t *testing.T) {
	_, at, _ := serve(t, newFake())
	conn := dial(t, at)
	fmt.Fprint(conn, "OPTIONS * HTTP/1.1\r\nHost: evil.example\r\n\r\n")
	if code, body := answer(t, bufio.NewReader(conn)); code != http.StatusMisdirectedRequest {
		t.Errorf("%d %q", code, body)
	}
}

// unread serves a server that answers 401 and reads no body.
func unread(t *testing.T, f *fake) {
	t.Helper()
	f.serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
}

// What remains of a body when the answer has ended is never taken for another request, and
// the connection ends unless that is certain.
func TestAnswerToAnUnreadBody(t *testing.T) {
	for name, c := range map[string]struct {
		refusal    error
		head, body string
		code       int
	}{
		"not dialled, sent with the head": {host.ErrDenied, "Content-Length: 5", "hello", 403},
		"not dialled, chunked":            {host.ErrLimit, "Transfer-Encoding: chunked", "5\r\nhello\r\n0\r\n\r\n", 503},
		"answered unread":                 {nil, "Content-Length: 5", "hello", 401},
		"answered unread, chunked":        {nil, "Transfer-Encoding: chunked", "1d\r\nGET / HTTP/1.1\r\nHost: x.y\r\n\r\n\r\n0\r\n\r\n", 401},
	} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, late %v", name, late), func(t *testing.T) {
				f := newFake()
				unread(t, f)
				f.refusal = c.refusal
				var log output.Buffer
				_, at, _ := serve(t, f, func(o *Options) {
					o.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
				})
				conn := dial(t, at)
				in := bufio.NewReader(conn)
				fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: web.localhost\r\n%s\r\n\r\n", c.head)
				if !late {
					_, _ = io.WriteString(conn, c.body)
				}
				resp, err := http.ReadResponse(in, nil)
				if err != nil {
					t.Fatal(err)
				}
				if resp.StatusCode != c.code {
					t.Errorf("answer %d, want %d", resp.StatusCode, c.code)
				}
				if late {
					_, _ = io.WriteString(conn, c.body)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
				_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: web.localhost\r\n\r\n")
				next, err := http.ReadResponse(in, nil)
				if err == nil {
					_ = next.Body.Close()
				}
				switch {
				case errors.Is(err, os.ErrDeadlineExceeded):
					t.Error("the connection is kept, and nothing is answered")
				case err != nil && !resp.Close:
					t.Errorf("the connection ended unannounced: %v", err)
				case err == nil && next.StatusCode != c.code:
					t.Errorf("the next answer is %d, want %d", next.StatusCode, c.code)
				}
				if s := log.String(); strings.Contains(s, "panic") {
					t.Errorf("log:\n%.2000s", s)
				}
			})
		}
	}
}

// A client that has an answer and never sends the rest of its body does not keep its connection.
func TestAnsweredBodiesEnd(t *testing.T) {
	for _, head := range []string{"Content-Length: 9", "Transfer-Encoding: chunked"} {
		f := newFake()
		unread(t, f)
		_, at, _ := serve(t, f)
		conn := dial(t, at)
		fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: web.localhost\r\n%s\r\n\r\n", head)
		if b, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) || !strings.HasPrefix(string(b), "HTTP/1.1 401 ") {
			t.Errorf("%s: %q, %v", head, b, err)
		}
	}
}

// The answer to an upload that is refused early reaches a client that reads only when it has
// sent all.
func TestEarlyAnswerToALargeBody(t *testing.T) {
	_, at := published(t, func(w http.ResponseWriter, q *http.Request) {
		c := http.NewResponseController(w)
		_ = c.EnableFullDuplex()
		w.Header().Set("Content-Length", "0")
		w.WriteHeader(http.StatusUnauthorized)
		_ = c.Flush()
		_, _ = io.Copy(io.Discard, q.Body) // or its own end would be a reset
	})
	conn := dial(t, at)
	const size = 900 << 10
	fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: web.localhost\r\nContent-Length: %d\r\n\r\n", size)
	if _, err := conn.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	if code, body := answer(t, bufio.NewReader(conn)); code != http.StatusUnauthorized {
		t.Errorf("%d %q", code, body)
	}
}

// A client that is refused, and never sends its body, does not keep its connection.
func TestRefusedBodiesEnd(t *testing.T) {
	_, at, _ := serve(t, newFake(), func(o *Options) { o.HeaderTimeout = 50 * time.Millisecond })
	for _, name := range []string{"evil.example", "none.localhost", "localhost"} {
		conn := dial(t, at)
		fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: %s\r\nContent-Length: 9\r\n\r\n", name)
		if _, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: the connection is open", name)
		}
	}
}
