// SPDX-License-Identifier: Apache-2.0

package status

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestMain(m *testing.M) { leak.Main(m) }

// fakeProvider says what a test sends into it.
type fakeProvider struct {
	deltas  chan Delta
	mu      sync.Mutex
	sources []Source
}

func (p *fakeProvider) List() List { return List{Publications: []Publication{}, Sources: p.Sources()} }

func (p *fakeProvider) Sources() []Source {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sources
}

func (p *fakeProvider) Changes(ctx context.Context, f func(Delta) error) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case d := <-p.deltas:
			if err := f(d); err != nil {
				return err
			}
		}
	}
}

func publication(number uint16) Publication {
	return Describe(port.Publication{
		Fact: port.Fact{
			Key:   port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: number},
			Owner: port.Owner{Kind: port.OwnerProcess, Name: `<img src=x onerror=alert(1)>`}, Decision: port.Decision{Allow: true},
		},
	}, nil)
}

// served is a server with its control socket and its page on TCP.
type served struct {
	provider *fakeProvider
	client   *Client
	url      string // of the page, with the token
}

func servePage(t *testing.T) *served {
	t.Helper()
	s := &served{provider: &fakeProvider{deltas: make(chan Delta), sources: []Source{{Name: "socket", State: "live"}}}}
	server := NewServer(Options{
		Provider: s.provider, Level: new(loglevel.Levels), Logger: slog.New(slog.DiscardHandler), Role: "agent", Name: "guest", Forwards: noForwards(t),
		Vitals: func(mark uint64) Vitals { return Vitals{TCP: 3, Latencies: []float64{float64(mark)}, Mark: mark + 1} },
	})
	path := filepath.Join(t.TempDir(), "c", "s")
	control, err := ListenControl(path)
	if err != nil {
		t.Fatal(err)
	}
	page, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	run(t, func(ctx context.Context) { _ = server.Serve(ctx, control, true) })
	run(t, func(ctx context.Context) { _ = server.ServeWeb(ctx, page) })
	s.client = NewClient(path)
	for s.url == "" { // until ServeWeb has begun
		if s.url, err = s.client.WebURL(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// run runs f until the test ends.
func run(t *testing.T, f func(context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); f(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

func (s *served) base() string { base, _, _ := strings.Cut(s.url, "/#token="); return base }

func (s *served) token() string { _, token, _ := strings.Cut(s.url, "#token="); return token }

// answer is what came back.
type answer struct {
	StatusCode int
	Header     http.Header
}

// request asks and returns status, header and body.
func request(t *testing.T, c *http.Client, method, url string, edit func(*http.Request)) (answer, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if edit != nil {
		edit(req)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header}, string(b)
}

func plain(t *testing.T) *http.Client {
	tr := &http.Transport{DisableKeepAlives: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func TestPageNeedsToken(t *testing.T) {
	s, c := servePage(t), plain(t)
	for _, path := range []string{"/v1/ports", "/v1/events", "/v1/explain?port=80", "/v1/loglevel", "/v1/loglevels", "/v1/web", "/v1/forwards", "/v1/trace", "/v1/other"} {
		for _, auth := range []string{"", "Bearer ", "Bearer x" + s.token(), "Basic " + s.token()} {
			resp, body := request(t, c, http.MethodGet, s.base()+path, func(r *http.Request) { r.Header.Set("Authorization", auth) })
			if resp.StatusCode != http.StatusUnauthorized || strings.Contains(body, "socket") {
				t.Errorf("%s with %q: %d %s", path, auth, resp.StatusCode, body)
			}
		}
		// A token in the address would stand in logs and histories.
		sep := "?"
		if strings.Contains(path, "?") {
			sep = "&"
		}
		if resp, _ := request(t, c, http.MethodGet, s.base()+path+sep+"token="+s.token(), nil); resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("%s with the token in the query: %d", path, resp.StatusCode)
		}
	}
	resp, body := request(t, c, http.MethodGet, s.base()+"/v1/ports", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+s.token()) })
	if resp.StatusCode != http.StatusOK || !strings.Contains(body, `"socket"`) {
		t.Errorf("with the token: %d %s", resp.StatusCode, body)
	}
}

func TestPageOnTCPChangesForwardsAlone(t *testing.T) {
	s, c := servePage(t), plain(t)
	for _, method := range []string{http.MethodPut, http.MethodPost, http.MethodDelete, http.MethodPatch} {
		for _, path := range []string{"/v1/loglevel", "/v1/loglevels", "/v1/forwards", "/v1/ports", "/v1/names", "/v1/web"} {
			if path == "/v1/forwards" && method == http.MethodPost {
				continue // TestForgedChangesAreRefused
			}
			resp, _ := request(t, c, method, s.base()+path, func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+s.token()) })
			if resp.StatusCode != http.StatusNotFound && resp.StatusCode != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %d", method, path, resp.StatusCode)
			}
		}
	}
}

// denying is a request that the page or somebody else sends.
const denying = `{"op":"deny","protocol":"tcp","port":8080}`

// What is forwarded is changed over TCP by who has the token for that, from the page itself,
// and by nobody else.
func TestForgedChangesAreRefused(t *testing.T) {
	s, c := servePage(t), plain(t)
	page, err := s.client.WebAddress(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, read, _ := strings.Cut(page.ReadOnly, "#token=")
	base := map[string]string{"Authorization": "Bearer " + s.token(), "Content-Type": "application/json", "Origin": s.base(), "Sec-Fetch-Site": "same-origin"}
	for _, q := range []struct {
		name, header, value string
		want                int
		says                string
	}{
		{"no token", "Authorization", "", 401, "token"},
		{"wrong token", "Authorization", "Bearer x", 401, "token"},
		{"token to read", "Authorization", "Bearer " + read, 403, "only reads"},
		{"another origin", "Origin", "http://127.0.0.1:9", 403, ""}, // also of this machine
		{"another site", "Sec-Fetch-Site", "cross-site", 403, ""},
		{"another port of this machine", "Sec-Fetch-Site", "same-site", 403, ""},
		{"no content type", "Content-Type", "", 415, "application/json"},
		{"text", "Content-Type", "text/plain", 415, "application/json"},
		{"a form", "Content-Type", "application/x-www-form-urlencoded", 415, "application/json"},
		{"a form's file", "Content-Type", "multipart/form-data; boundary=application/json", 415, "application/json"},
		{"another name of this machine", "Host", "evil.example", 421, ""},
		{"who gives up the right", readOnlyHeader, "so", 403, "changes nothing"},
	} {
		resp, body := request(t, c, http.MethodPost, s.base()+"/v1/forwards", func(r *http.Request) {
			for k, v := range base {
				r.Header.Set(k, v)
			}
			r.Header.Set(q.header, q.value)
			if q.value == "" {
				r.Header.Del(q.header)
			}
			if q.header == "Origin" {
				r.Header.Del("Sec-Fetch-Site") // of a browser that does not send it
			}
			if q.header == "Host" {
				r.Host = q.value
			}
			r.Body = io.NopCloser(strings.NewReader(denying))
		})
		if resp.StatusCode != q.want || !strings.Contains(body, q.says) {
			t.Errorf("%s: %d %s, want %d %s", q.name, resp.StatusCode, body, q.want, q.says)
		}
	}
	// Not by a link or an image either, and a GET carries nothing out.
	resp, body := request(t, c, http.MethodGet, s.base()+"/v1/forwards?op=deny&protocol=tcp&port=8080", func(r *http.Request) { r.Header.Set("Authorization", base["Authorization"]) })
	if resp.StatusCode != http.StatusOK || !strings.Contains(body, `"requests":[]`) {
		t.Errorf("GET: %d %s", resp.StatusCode, body)
	}
	resp, body = request(t, c, http.MethodPost, s.base()+"/v1/forwards", func(r *http.Request) {
		for k, v := range base {
			r.Header.Set(k, v)
		}
		r.Body = io.NopCloser(strings.NewReader(denying))
	})
	if resp.StatusCode != http.StatusOK || !strings.Contains(body, `"added":[{"op":"deny","protocol":"tcp","port":8080}]`) || !strings.Contains(body, `"undo":{"op":"allow","protocol":"tcp","port":8080}`) {
		t.Errorf("the page itself: %d %s", resp.StatusCode, body)
	}
}

// A browser at a tunnel to the control socket has no token, and changes nothing.
func TestTunnelledPageChangesNothing(t *testing.T) {
	s := servePage(t)
	for header, value := range map[string]string{"Origin": "http://fairlead", "Sec-Fetch-Site": "same-origin"} {
		resp, body := request(t, s.client.http, http.MethodPost, "http://fairlead/v1/forwards", func(r *http.Request) {
			r.Header.Set(header, value)
			r.Header.Set("Content-Type", "application/json")
			r.Body = io.NopCloser(strings.NewReader(denying))
		})
		if resp.StatusCode != http.StatusForbidden || !strings.Contains(body, "without a token; `fairlead web`") {
			t.Errorf("%s: %d %s", header, resp.StatusCode, body)
		}
	}
}

// The page is told whether it may change something, and if not, why; and what was changed.
func TestPageIsToldWhatItMayChange(t *testing.T) {
	s, c := servePage(t), plain(t)
	page, err := s.client.WebAddress(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	begin := func(url string) (*bufio.Reader, hello) {
		base, token, _ := strings.Cut(url, "/#token=")
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, base+"/v1/events", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = resp.Body.Close() })
		var h hello
		r := bufio.NewReader(resp.Body)
		if event, data := next(t, r); event != "hello" || json.Unmarshal([]byte(data), &h) != nil {
			t.Fatalf("%s %s", event, data)
		}
		return r, h
	}
	if _, h := begin(page.ReadOnly); h.Changes || !strings.Contains(h.Why, "only reads") {
		t.Errorf("with the token to read: %+v", h)
	}
	r, h := begin(page.URL)
	if !h.Changes || h.Why != "" {
		t.Errorf("with the token to change: %+v", h)
	}
	rules := func() (f Forwards) {
		for {
			if event, data := next(t, r); event == "forwards" {
				if err := json.Unmarshal([]byte(data), &f); err != nil {
					t.Fatal(err)
				}
				return f
			}
		}
	}
	first := rules()
	change, err := s.client.ChangeForwards(t.Context(), forwards.Request{Op: forwards.Deny, All: true})
	if err != nil {
		t.Fatal(err)
	}
	second := rules()
	if len(first.Requests) != 0 || len(second.Requests) != 1 || second.Requests[0].Request.String() != "deny all" || second.Requests[0].Undo != (forwards.Request{Op: forwards.Allow, All: true}) {
		t.Errorf("rules %+v, then %+v", first, second)
	}
	if second.Generation <= first.Generation || second.Generation != change.Generation {
		t.Errorf("generations %d, %d; %d of the change", first.Generation, second.Generation, change.Generation)
	}
}

// A name that somebody makes resolve to 127.0.0.1 gives his page our origin.
func TestForeignHostNamesAreRefused(t *testing.T) {
	s, c := servePage(t), plain(t)
	for host, want := range map[string]int{
		"127.0.0.1": 200, "127.0.0.1:9": 200, "localhost:7420": 200, "[::1]:80": 200, "fairlead": 200,
		"evil.example": 421, "evil.example:7420": 421, "127.0.0.1.evil.example": 421, "192.168.1.5": 421, "localhost.evil.example": 421,
	} {
		for name, do := range map[string]struct {
			client *http.Client
			base   string
		}{"tcp": {c, s.base()}, "control": {s.client.http, "http://fairlead"}} {
			resp, _ := request(t, do.client, http.MethodGet, do.base+"/", func(r *http.Request) { r.Host = host })
			if resp.StatusCode != want {
				t.Errorf("%s: Host %s: %d, want %d", name, host, resp.StatusCode, want)
			}
		}
	}
}

// Through an SSH tunnel to the control socket a browser could send this.
func TestForeignOriginRefused(t *testing.T) {
	s := servePage(t)
	for header, value := range map[string]string{"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"} {
		resp, _ := request(t, s.client.http, http.MethodPut, "http://fairlead/v1/loglevel", func(r *http.Request) { r.Header.Set(header, value) })
		if resp.StatusCode != http.StatusForbidden {
			t.Errorf("%s: %s: %d, want 403", header, value, resp.StatusCode)
		}
		resp, _ = request(t, s.client.http, http.MethodPost, "http://fairlead/v1/forwards", func(r *http.Request) { r.Header.Set(header, value) })
		if resp.StatusCode != http.StatusForbidden {
			t.Errorf("forwards, %s: %s: %d, want 403", header, value, resp.StatusCode)
		}
	}
	if level, err := s.client.LogLevel(t.Context(), "debug", 0); err != nil || level != "debug" {
		t.Errorf("the command line's own: %q, %v", level, err)
	}
}

func TestPageAllowsNothingFromElsewhere(t *testing.T) {
	s, c := servePage(t), plain(t)
	resp, body := request(t, c, http.MethodGet, s.base()+"/", nil)
	csp := resp.Header.Get("Content-Security-Policy")
	for _, want := range []string{"default-src 'none'", "script-src 'self';", "style-src 'self';", "connect-src 'self';", "frame-ancestors 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'"} {
		if !strings.Contains(csp, want) {
			t.Errorf("policy %q lacks %q", csp, want)
		}
	}
	for _, never := range []string{"http://", "https://", "//cdn", "style=", "onclick=", "<script>"} {
		if strings.Contains(body, never) {
			t.Errorf("the page has %q", never)
		}
	}
	files, err := pageFiles.ReadDir("page")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := pageFiles.ReadFile("page/" + f.Name())
		if err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(string(b), "http://www.w3.org/2000/svg", "")
		for _, never := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "@import", "@font-face", "https://"} {
			if strings.Contains(text, never) {
				t.Errorf("%s has %q", f.Name(), never)
			}
		}
		path := "/page/" + f.Name()
		if f.Name() == "index.html" {
			continue
		}
		resp, got := request(t, c, http.MethodGet, s.base()+path, nil)
		if resp.StatusCode != http.StatusOK || got != string(b) || resp.Header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: %d, %d bytes, %v", path, resp.StatusCode, len(got), resp.Header)
		}
		resp, _ = request(t, c, http.MethodGet, s.base()+path, func(r *http.Request) { r.Header.Set("If-None-Match", resp.Header.Get("ETag")) })
		if resp.StatusCode != http.StatusNotModified {
			t.Errorf("%s again: %d, want 304", path, resp.StatusCode)
		}
	}
}

// next reads one event of a stream.
func next(t *testing.T, r *bufio.Reader) (event string, data string) {
	t.Helper()
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		line = strings.TrimSuffix(line, "\n")
		switch {
		case line == "":
			return event, data
		case strings.HasPrefix(line, "event: "):
			event = line[len("event: "):]
		case strings.HasPrefix(line, "data: "):
			data = line[len("data: "):]
		}
	}
}

func TestEventStream(t *testing.T) {
	s := servePage(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	resp, err := s.client.do(ctx, http.MethodGet, "/v1/events", "", answerTimeout)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if kind := resp.Header.Get("Content-Type"); kind != "text/event-stream" {
		t.Errorf("content type %q", kind)
	}
	r := bufio.NewReader(resp.Body)
	seen := map[string]string{}
	for len(seen) < 5 { // hello first; then the beat, which is on its own
		event, data := next(t, r)
		if len(seen) == 0 && event != "hello" {
			t.Errorf("first event %q", event)
		}
		seen[event] = data
	}
	if !strings.Contains(seen["hello"], `"role":"agent","name":"guest"`) || !strings.Contains(seen["sources"], `"socket"`) || !strings.Contains(seen["vitals"], `"tcp":3`) || seen["peers"] == "" || !strings.Contains(seen["forwards"], `"requests":[]`) {
		t.Errorf("began with %v", seen)
	}
	rowsNext := func() (got rows) {
		for {
			event, data := next(t, r)
			if event != "rows" {
				continue
			}
			if strings.Contains(data, "<img") {
				t.Errorf("markup is not escaped in %s", data)
			}
			if err := json.Unmarshal([]byte(data), &got); err != nil {
				t.Fatal(err)
			}
			return got
		}
	}
	var all []Publication
	for i := range rowsAMax + 1 {
		all = append(all, publication(uint16(i+1)))
	}
	s.provider.deltas <- Delta{Generation: 1, Put: all}
	first, second := rowsNext(), rowsNext()
	if !first.Reset || !first.More || len(first.Put) != rowsAMax || second.Reset || second.More || len(second.Put) != 1 {
		t.Errorf("in parts: %v %v %d, %v %v %d", first.Reset, first.More, len(first.Put), second.Reset, second.More, len(second.Put))
	}
	s.provider.deltas <- Delta{Generation: 2, Removed: []RowID{{Key: publication(7).Key}}}
	if got := rowsNext(); got.Reset || got.More || len(got.Removed) != 1 || got.Removed[0].Port != 7 || got.Generation != 2 {
		t.Errorf("change: %+v", got)
	}
}

func TestEventStreamsAreBounded(t *testing.T) {
	provider := &fakeProvider{deltas: make(chan Delta)}
	server := NewServer(Options{Provider: provider, Logger: slog.New(slog.DiscardHandler), MaxWatches: 1})
	path := filepath.Join(t.TempDir(), "c", "s")
	l, err := ListenControl(path)
	if err != nil {
		t.Fatal(err)
	}
	run(t, func(ctx context.Context) { _ = server.Serve(ctx, l, true) })
	c := NewClient(path)
	ctx, cancel := context.WithCancel(t.Context())
	resp, err := c.do(ctx, http.MethodGet, "/v1/events", "", answerTimeout)
	if err != nil {
		t.Fatal(err)
	}
	second, err := c.do(t.Context(), http.MethodGet, "/v1/events", "", answerTimeout)
	if err == nil {
		_ = second.Body.Close()
		t.Error("a second stream was given")
	} else if !strings.Contains(err.Error(), "too many watches") {
		t.Errorf("a second stream: %v", err)
	}
	cancel()
	_ = resp.Body.Close()
	wait.Until(t, "a stream that ended makes room for another", func() error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		resp, err := c.do(ctx, http.MethodGet, "/v1/events", "", answerTimeout)
		if err == nil {
			_ = resp.Body.Close()
		}
		return err
	})
}

func TestRelay(t *testing.T) {
	s, c := servePage(t), plain(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	urls := make(chan string, 1)
	run(t, func(ctx context.Context) { _ = Relay(ctx, s.client, l, false, func(url string) { urls <- url }) })
	r := served{url: <-urls}
	if r.token() == s.token() {
		t.Error("the relay's token is the server's")
	}
	if resp, body := request(t, c, http.MethodGet, r.base()+"/", nil); resp.StatusCode != http.StatusOK || !strings.Contains(body, "<title>fairlead") {
		t.Errorf("page: %d %s", resp.StatusCode, body)
	}
	auth := func(r2 *http.Request) { r2.Header.Set("Authorization", "Bearer "+r.token()) }
	if resp, _ := request(t, c, http.MethodGet, r.base()+"/v1/ports", nil); resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("without token: %d", resp.StatusCode)
	}
	if resp, body := request(t, c, http.MethodGet, r.base()+"/v1/ports", auth); resp.StatusCode != http.StatusOK || !strings.Contains(body, `"socket"`) {
		t.Errorf("with token: %d %s", resp.StatusCode, body)
	}
	for _, path := range []string{"/v1/loglevel", "/v1/loglevels", "/v1/web", "/metrics"} {
		if resp, _ := request(t, c, http.MethodGet, r.base()+path, auth); resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %d, want what the page does not need to be out of reach", path, resp.StatusCode)
		}
	}
	deny := func(r2 *http.Request) {
		auth(r2)
		r2.Header.Set("Content-Type", "application/json")
		r2.Header.Set("Origin", r.base())
		r2.Header.Set("Sec-Fetch-Site", "same-origin")
		r2.Body = io.NopCloser(strings.NewReader(denying))
	}
	if resp, body := request(t, c, http.MethodPost, r.base()+"/v1/forwards", deny); resp.StatusCode != http.StatusOK || !strings.Contains(body, `"op":"deny"`) {
		t.Errorf("change: %d %s", resp.StatusCode, body)
	}
	foreign := func(r2 *http.Request) { deny(r2); r2.Header.Set("Sec-Fetch-Site", "cross-site") }
	if resp, _ := request(t, c, http.MethodPost, r.base()+"/v1/forwards", foreign); resp.StatusCode != http.StatusForbidden {
		t.Errorf("change from elsewhere: %d", resp.StatusCode)
	}
	untyped := func(r2 *http.Request) { deny(r2); r2.Header.Del("Content-Type") }
	if resp, _ := request(t, c, http.MethodPost, r.base()+"/v1/forwards", untyped); resp.StatusCode != http.StatusUnsupportedMediaType {
		t.Errorf("change without a content type: %d", resp.StatusCode)
	}
	readOnly, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	run(t, func(ctx context.Context) { _ = Relay(ctx, s.client, readOnly, true, func(url string) { urls <- url }) })
	r.url = <-urls
	if resp, body := request(t, c, http.MethodPost, r.base()+"/v1/forwards", deny); resp.StatusCode != http.StatusForbidden || !strings.Contains(body, "only reads") {
		t.Errorf("change where the page only reads: %d %s", resp.StatusCode, body)
	}
	stripped := func(r2 *http.Request) { deny(r2); r2.Header.Set("Connection", readOnlyHeader) }
	if resp, body := request(t, c, http.MethodPost, r.base()+"/v1/forwards", stripped); resp.StatusCode != http.StatusForbidden {
		t.Errorf("change with what says so taken off: %d %s", resp.StatusCode, body)
	}
	if resp, body := request(t, c, http.MethodGet, r.base()+"/v1/ports", auth); resp.StatusCode != http.StatusOK {
		t.Errorf("read where the page only reads: %d %s", resp.StatusCode, body)
	}
	// Events come through as they happen, and end with their reader.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.base()+"/v1/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	auth(req)
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if event, _ := next(t, bufio.NewReader(resp.Body)); event != "hello" {
		t.Errorf("first event through the relay: %q", event)
	}
}

func TestTokensDiffer(t *testing.T) {
	seen := map[string]bool{}
	for range 100 {
		token := newToken()
		if len(token) != 43 || seen[token] {
			t.Fatalf("token %q", token)
		}
		seen[token] = true
	}
}
