// SPDX-License-Identifier: Apache-2.0

package own

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// echo answers one connection with a byte, and counts it.
type echo struct{ served atomic.Int64 }

func (e *echo) handle(c net.Conn) {
	e.served.Add(1)
	_, _ = c.Write([]byte{1})
	_ = c.Close()
}

// ask connects and waits for the answer.
func ask(t *testing.T, address string) {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatalf("%s: %v", address, err)
	}
}

func listen(t *testing.T, s *Sockets) net.Listener {
	t.Helper()
	ln, err := s.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not within a minute: " + what)
		}
	}
}

func TestStartServesListenersThatWereIdle(t *testing.T) {
	const n = 100
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var s Sockets
	var e echo
	a := acceptor(slog.New(slog.DiscardHandler))
	a.idle = 20 * time.Millisecond
	before := runtime.NumGoroutine()
	var listeners []net.Listener
	var closers []io.Closer
	for range n {
		ln := listen(t, &s)
		listeners = append(listeners, ln)
		closers = append(closers, a.Start(ctx, ln, wg.Go, e.handle, func(_ io.Closer, err error) { t.Error(err) }))
	}
	few := func() bool { return runtime.GOOS != "linux" || runtime.NumGoroutine() < before+10 }
	for round := range 3 {
		until(t, "idle listeners have no goroutines", few)
		for _, ln := range listeners {
			ask(t, ln.Addr().String())
			ask(t, ln.Addr().String())
		}
		if got := e.served.Load(); got != int64((round+1)*2*n) {
			t.Errorf("%d connections served in %d rounds", got, round+1)
		}
	}
	// One is closed while it may still have a goroutine, the others while they are idle.
	for i, c := range closers {
		if i == 1 {
			until(t, "idle listeners have no goroutines", few)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if _, err := listeners[i].Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
	cancel()
	wg.Wait() // also the goroutine that waits for all
}

// Connections and Close at the same time: nothing fails, and no goroutine is left.
func TestStartAndClose(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg, clients sync.WaitGroup
	var s Sockets
	var e echo
	a := acceptor(slog.New(slog.DiscardHandler))
	a.idle = time.Millisecond
	for i := range 200 {
		ln := listen(t, &s)
		c := a.Start(ctx, ln, wg.Go, e.handle, func(_ io.Closer, err error) { t.Error(err) })
		clients.Go(func() {
			if c, err := net.Dial("tcp", ln.Addr().String()); err == nil {
				_ = c.Close()
			}
		})
		clients.Go(func() {
			time.Sleep(time.Duration(i%5) * time.Millisecond)
			_ = c.Close()
		})
	}
	clients.Wait()
	cancel()
	wg.Wait()
}

func TestStartReportsAListenerThatFails(t *testing.T) {
	type failure struct {
		listener io.Closer
		err      error
	}
	failed := make(chan failure, 1)
	l := &scripted{errs: []error{syscall.EINVAL}}
	var wg sync.WaitGroup
	c := acceptor(slog.New(slog.DiscardHandler)).Start(t.Context(), l, wg.Go, func(net.Conn) {}, func(l io.Closer, err error) {
		failed <- failure{l, err}
	})
	if f := <-failed; f.listener != c || !errors.Is(f.err, syscall.EINVAL) {
		t.Errorf("%v of %v, want EINVAL of %v", f.err, f.listener, c)
	}
	wg.Wait()
}
