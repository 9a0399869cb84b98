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

// The page is plain HTML, CSS and modules: no build step, nothing from elsewhere.
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
	w.Header().Set("Cache-Control", "no-cache") // ask each time whether it is still this one
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(a.content))
}

// pageRoutes serves the page itself, which holds nothing that is worth a token.
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

// contentType does not ask the system's table: it may say otherwise, and to read
// it takes milliseconds of the start.
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

// WebAddress is the answer of /v1/web.
type WebAddress struct {
	URL string `json:"url"`
}

// webRoutes is what the page asks for. None of it changes anything.
func (s *Server) webRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/ports", s.list)
	mux.HandleFunc("GET /v1/events", s.events)
	if s.o.Explainer != nil {
		mux.HandleFunc("GET /v1/explain", s.explain)
		mux.HandleFunc("POST /v1/explain", s.explain)
	}
}

// ServeWeb shows the page on l, which must listen on a loopback address and is
// closed when ctx ends. Whoever has no token, which WebURL tells, gets no data:
// a loopback port is open to every program of the machine, and a relay such as
// WSL's opens it to those of another.
func (s *Server) ServeWeb(ctx context.Context, l net.Listener) error {
	api := http.NewServeMux()
	s.webRoutes(api)
	mux := http.NewServeMux()
	pageRoutes(mux)
	mux.Handle("/v1/", withToken(s.token, api))
	s.webURL.Store(fmt.Sprintf("http://%s/#token=%s", l.Addr(), s.token))
	defer s.webURL.Store("")
	return s.serve(ctx, l, guard(mux))
}

// web tells whoever may use the control socket where the page is.
func (s *Server) web(w http.ResponseWriter, _ *http.Request) {
	url, _ := s.webURL.Load().(string)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(WebAddress{url})
}

// WebURL returns where the page is served on TCP, with its token; empty where
// it is not.
func (c *Client) WebURL(ctx context.Context) (string, error) {
	resp, err := c.do(ctx, http.MethodGet, "/v1/web", "")
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	var a WebAddress
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil {
		return "", fmt.Errorf("control socket %s: %w", c.path, err)
	}
	return a.URL, nil
}
