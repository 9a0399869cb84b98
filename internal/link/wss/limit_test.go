// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/testkit/output"
	"github.com/fairlead/fairlead/internal/testkit/wait"
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

// The last descriptors are kept for other uses.
func TestConnectionIsClosedWhenDescriptorsAreScarce(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	r.stop()
	var scarce atomic.Bool
	scarce.Store(true)
	server, err := NewServer(r.server.o)
	if err != nil {
		t.Fatal(err)
	}
	server.scarce = func(conn any, use own.Use) bool {
		if _, ok := conn.(syscall.Conn); !ok || use != own.ForLink {
			t.Errorf("asked about %T for %v", conn, use)
		}
		return scarce.Load()
	}
	r.server = server
	r.serve("127.0.0.1:0")
	c, err := net.Dial("tcp", r.ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(wait.Limit()))
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	scarce.Store(false)
	host, agent := r.connect(r.dialer(nil))
	carry(t, host, agent, []byte("hello"))
}

// The end of a server does not wait for a link that waits for another.
func TestServerEndsWhileALinkIsOffered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startInMemory(t, newAuthority(t, "test"), nil)
		hole := &relay{dialServer: r.dial}
		_, _ = r.connect(r.dialer(func(o *DialOptions) { o.dial = hole.dial }))
		hole.silence()
		second, err := r.dialer(nil).Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = second.Close() }()
		synctest.Wait()
		if len(r.server.places["a"].turn) == 0 {
			t.Error("it is not offered")
		}
		began := time.Now()
		r.stop()
		if took := time.Since(began); took != 0 {
			t.Errorf("ended after %v", took)
		}
	})
}

// Anybody can cause lines about unknown names: they do not hide why a guest is refused.
func TestEachGuestHasItsOwnRefusals(t *testing.T) {
	var log output.Buffer
	r := start(t, newAuthority(t, "test"), func(o *ServerOptions) { o.Link.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	for _, name := range []string{"unknown", "a", "b"} {
		if at := r.server.LastRefused("b").At; !at.IsZero() {
			t.Errorf("b was refused at %v", at)
		}
		if _, err := r.dialer(func(o *DialOptions) { o.Name, o.Link.Token = name, token(t, "x") }).Dial(t.Context()); err == nil {
			t.Fatal("connected")
		}
		wait.Until(t, "a line", func() error {
			if text := log.String(); !strings.Contains(text, "guest="+name) {
				return errors.New(text)
			}
			return nil
		})
	}
	for _, name := range []string{"a", "b"} {
		got := r.server.LastRefused(name)
		if got.At.IsZero() || !strings.HasPrefix(got.Peer, "127.0.0.1:") || got.Err == nil || !strings.Contains(got.Err.Error(), "differ") {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
