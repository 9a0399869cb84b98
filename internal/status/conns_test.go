// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// Silent connections, any number of them, hold up nobody; the newest ones stay open.
func TestSilentConnectionsHoldUpNobody(t *testing.T) {
	s := servePage(t)
	dial := func() net.Conn {
		c, err := net.Dial("unix", s.client.path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	first := dial()
	for range 2 * maxConns {
		dial()
	}
	begin := time.Now()
	if _, err := s.client.List(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(begin); d >= headerTimeout {
		t.Errorf("an answer took %s", d)
	}
	_ = first.SetReadDeadline(time.Now().Add(wait.Limit()))
	if _, err := first.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !strings.Contains(err.Error(), "reset") {
		t.Errorf("the oldest silent connection: %v, want its end", err)
	}
}

// A request that is under way is not closed for silent connections.
func TestRequestsSurviveSilentConnections(t *testing.T) {
	s := servePage(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events := make(chan Event, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- s.client.Watch(ctx, func(e Event) error { events <- e; return nil })
	}()
	s.provider.deltas <- Delta{}
	for range 2 * maxConns {
		c, err := net.Dial("unix", s.client.path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if _, err := s.client.List(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		t.Errorf("the watch ended: %v", err)
	default:
	}
}

// A process that has the control socket and does not answer is an error that says so.
func TestClientGivesUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	begin := time.Now()
	c := NewClient(path)
	c.patience = 50 * time.Millisecond
	_, err = c.List(t.Context())
	if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "no answer within") {
		t.Errorf("error %v, want one that names the socket", err)
	}
	if d := time.Since(begin); d > wait.Limit() {
		t.Errorf("it took %s", d)
	}
}

// One that answers only in part is one as well, for each question.
func TestClientGivesUpInAnAnswer(t *testing.T) {
	for name, ask := range map[string]func(context.Context, *Client) error{
		"list":     func(ctx context.Context, c *Client) error { _, err := c.List(ctx); return err },
		"loglevel": func(ctx context.Context, c *Client) error { _, err := c.LogLevel(ctx, "", 0); return err },
		"page":     func(ctx context.Context, c *Client) error { _, err := c.WebURL(ctx); return err },
		"rules":    func(ctx context.Context, c *Client) error { _, err := c.TestRules(ctx, RuleQuery{}); return err },
		"forwards": func(ctx context.Context, c *Client) error { _, err := c.Forwards(ctx); return err },
		"forward": func(ctx context.Context, c *Client) error {
			_, err := c.ChangeForwards(ctx, forwards.Request{})
			return err
		},
		"settings": func(ctx context.Context, c *Client) error { _, err := c.Settings(ctx); return err },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write([]byte("{"))
				_ = http.NewResponseController(w).Flush()
				<-ended
			})}
			var serving sync.WaitGroup
			serving.Go(func() { _ = srv.Serve(l) })
			defer serving.Wait()
			defer func() { _ = srv.Close() }()
			defer close(ended)
			c := NewClient(path)
			c.patience = 50 * time.Millisecond
			done := make(chan error, 1)
			go func() { done <- ask(t.Context(), c) }()
			if err := wait.For(t, "an error", done); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "no answer within") {
				t.Errorf("error %v, want one that names the socket", err)
			}
		})
	}
}

// counted is a context that counts what waits for its end.
type counted struct {
	context.Context //nolint:containedctx // it is one
	done            chan struct{}
	waiting         atomic.Int64
}

func (c *counted) Done() <-chan struct{} { return c.done }

// AfterFunc is what package context calls for a context derived from c.
func (c *counted) AfterFunc(func()) (stop func() bool) {
	c.waiting.Add(1)
	return func() bool { c.waiting.Add(-1); return true }
}

// A context that many questions are asked with does not grow.
func TestClientLeavesNothingInAContext(t *testing.T) {
	s := servePage(t)
	ctx := &counted{Context: t.Context(), done: make(chan struct{})}
	for range 3 {
		if _, err := s.client.List(ctx); err != nil {
			t.Fatal(err)
		}
		if _, err := s.client.TestRules(ctx, RuleQuery{}); err == nil {
			t.Fatal("no error")
		}
	}
	if _, err := NewClient(filepath.Join(t.TempDir(), "none")).List(ctx); err == nil {
		t.Fatal("no error")
	}
	wait.Until(t, "nothing waits for the context", func() error {
		if n := ctx.waiting.Load(); n != 0 {
			return fmt.Errorf("%d do", n)
		}
		return nil
	})
}
