// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/fairlead/fairlead/test/kit/wait"
)

func dialTLS(t *testing.T, r *rig, protocols ...string) *tls.Conn {
	t.Helper()
	c, err := tls.Dial("tcp", r.ln.Addr().String(), &tls.Config{ServerName: "localhost", RootCAs: poolOf(readBundle(t, r.ca)), NextProtos: protocols})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// HTTP/2 has many requests on a connection, which would be outside the limits.
func TestNoHTTP2(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	if p := dialTLS(t, r, "h2", "http/1.1").ConnectionState().NegotiatedProtocol; p != "http/1.1" {
		t.Errorf("negotiated %q", p)
	}
	c, err := tls.Dial("tcp", r.ln.Addr().String(), &tls.Config{ServerName: "localhost", RootCAs: poolOf(readBundle(t, r.ca)), NextProtos: []string{"h2"}})
	if err == nil {
		_ = c.Close()
		t.Error("negotiated h2")
	}
}

func (s *Server) countUnproved() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.unproved)
}

// A connection counts as unproved until it ends, though its request was refused.
func TestRefusedRequestCountsUntilItsConnectionEnds(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	near, far := net.Pipe()
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	r.server.enter(near)
	for _, header := range []http.Header{nil, {"Connection": {"Upgrade"}, "Upgrade": {"websocket"}}} {
		req := httptest.NewRequestWithContext(context.WithValue(t.Context(), connKey{}, near), http.MethodGet, pathLink+"a", nil)
		req.SetPathValue("name", "a")
		req.Header = header
		r.server.serveLink(t.Context(), httptest.NewRecorder(), req)
		if n := r.server.countUnproved(); n != 1 {
			t.Errorf("%d connections count, want 1", n)
		}
	}
	r.server.changed(near, http.StateClosed)
	if n := r.server.countUnproved(); n != 0 {
		t.Errorf("%d connections count after the end", n)
	}
}

// One that became a WebSocket and failed then is not left behind.
func TestRefusedLinkCountsNoMore(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	for range 3 {
		if _, err := r.dialer(func(o *DialOptions) { o.Link.Token = token(t, "x") }).Dial(t.Context()); err == nil {
			t.Fatal("connected")
		}
	}
	wait.Until(t, "none counts", func() error {
		if n := r.server.countUnproved(); n != 0 {
			return fmt.Errorf("%d connections count", n)
		}
		return nil
	})
}
