// SPDX-License-Identifier: Apache-2.0

package status

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"path"
	"time"
)

// The page is plain HTML, CSS and modules: no build step, no external resources.
//
//go:embed page
var pageFiles embed.FS

// asset is one file of the page.
type asset struct {
	content    []byte
	kind, etag string
}

func (a asset) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", a.kind)
	w.Header().Set("ETag", a.etag)
	w.Header().Set("Cache-Control", "no-cache") // revalidate at each request
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(a.content))
}

// pageRoutes serves the page's files, which are public and need no token.
func pageRoutes(mux *http.ServeMux) {
	files, err := fs.ReadDir(pageFiles, "page")
	if err != nil {
		panic(err) // embedded: it is there
	}
	for _, f := range files {
		content, err := pageFiles.ReadFile("page/" + f.Name())
		if err != nil {
			panic(err)
		}
		sum := sha256.Sum256(content)
		a := asset{content, contentType(f.Name()), `"` + hex.EncodeToString(sum[:8]) + `"`}
		if f.Name() == "index.html" {
			mux.Handle("GET /{$}", a)
			continue
		}
		mux.Handle("GET /page/"+f.Name(), a)
	}
}

// contentType does not use the system's table, which may differ and takes
// milliseconds to read.
func contentType(name string) string {
	switch path.Ext(name) {
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".html":
		return "text/html; charset=utf-8"
	case ".svg":
		return "image/svg+xml"
	}
	return "application/octet-stream"
}

// WebAddress is the response of /v1/web. Its URLs have a token, and are empty if the page
// is not served on TCP.
type WebAddress struct {
	URL      string `json:"url"`
	ReadOnly string `json:"readOnly"` // of a page that changes nothing
}

// webRoutes are the routes that the page needs. They change nothing but what is forwarded.
func (s *Server) webRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/ports", s.list)
	mux.HandleFunc("GET /v1/events", s.events)
	if s.o.Explainer != nil {
		mux.HandleFunc("GET /v1/explain", s.explain)
		mux.HandleFunc("POST /v1/explain", s.explain)
	}
	if s.o.Names != nil {
		mux.HandleFunc("GET /v1/names", s.names)
	}
	if s.o.Forwards != nil {
		mux.HandleFunc("GET /v1/forwards", s.listForwards)
		mux.Handle("POST /v1/forwards", jsonOnly(http.HandlerFunc(s.changeForwards)))
	}
}

// ServeWeb serves the page on l, which must listen on a loopback address and is closed
// when ctx ends. Data needs a token of WebAddress: every program of the machine can
// connect to a loopback port, and with a relay such as WSL's those of another machine.
func (s *Server) ServeWeb(ctx context.Context, l net.Listener) error {
	api := http.NewServeMux()
	s.webRoutes(api)
	mux := http.NewServeMux()
	pageRoutes(mux)
	mux.Handle("/v1/", withToken(s.tokens, api))
	url := func(token string) string { return fmt.Sprintf("http://%s/#token=%s", l.Addr(), token) }
	s.web.Store(WebAddress{URL: url(s.tokens.Change), ReadOnly: url(s.tokens.Read)})
	defer s.web.Store(WebAddress{})
	return s.serve(ctx, l, guard(mux))
}

// webAddress returns the page's URLs to users of the control socket.
func (s *Server) webAddress(w http.ResponseWriter, _ *http.Request) {
	a, _ := s.web.Load().(WebAddress)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(a)
}

// WebAddress returns where the page is.
func (c *Client) WebAddress(ctx context.Context) (WebAddress, error) {
	return ask[WebAddress](ctx, c, http.MethodGet, "/v1/web", nil, 0)
}

// WebURL returns the page's URL with the token of one that changes what is forwarded, or ""
// if it is not served on TCP.
func (c *Client) WebURL(ctx context.Context) (string, error) {
	a, err := c.WebAddress(ctx)
	return a.URL, err
}
