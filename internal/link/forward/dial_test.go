// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// answer is what a target does after a while: it takes the connection if err is nil.
type answer struct {
	after time.Duration
	err   error
}

// closed is a connection that records whether it was closed.
type closed struct {
	net.Conn
	to   netip.AddrPort
	once sync.Once
	done chan struct{}
}

func (c *closed) Close() error { c.once.Do(func() { close(c.done) }); return nil }

func TestParallelDial(t *testing.T) {
	refused := fmt.Errorf("dial: %w", syscall.ECONNREFUSED)
	never := answer{after: time.Hour}
	for _, tt := range []struct {
		name    string
		answers []answer // of 192.0.2.0, 192.0.2.1, ...
		took    time.Duration
		at      int
		failure string
		reasons int
	}{
		{"the only one", []answer{{after: time.Second}}, time.Second, 0, "", 0},
		{"the first is quick", []answer{{after: 200 * time.Millisecond}, {}}, 200 * time.Millisecond, 0, "", 0},
		{"the first refuses", []answer{{err: refused}, {after: 100 * time.Millisecond}}, 100 * time.Millisecond, 1, "", 0},
		{"the first is silent", []answer{never, {}}, attemptDelay, 1, "", 0},
		{"the first is slow, the second slower", []answer{{after: time.Second}, never}, time.Second, 0, "", 0},
		{"two are silent", []answer{never, never, {after: time.Millisecond}}, 2*attemptDelay + time.Millisecond, 2, "", 0},
		{"silent, then refused", []answer{never, {err: refused}, {}}, attemptDelay, 2, "", 0},
		{"none", []answer{never, {err: refused}}, 5 * time.Second, 0, "refused", 2},
		{"all silent", []answer{never, never}, 5*time.Second + attemptDelay, 0, "unreachable", 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				made := make(map[netip.AddrPort]*closed)
				var mu sync.Mutex
				s, err := NewServer(ServerOptions{Dial: func(ctx context.Context, _ string, to netip.AddrPort) (net.Conn, error) {
					a := tt.answers[to.Addr().As4()[3]]
					select {
					case <-time.After(a.after):
					case <-ctx.Done():
						return nil, ctx.Err()
					}
					if a.err != nil {
						return nil, a.err
					}
					c := &closed{to: to, done: make(chan struct{})}
					mu.Lock()
					made[to] = c
					mu.Unlock()
					return c, nil
				}})
				if err != nil {
					t.Fatal(err)
				}
				var targets []netip.AddrPort
				for i := range tt.answers {
					targets = append(targets, netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 80))
				}
				began := time.Now()
				conn, at, err := s.dial(t.Context(), "tcp", targets, Request{})
				if took := time.Since(began); took != tt.took {
					t.Errorf("took %v, want %v", took, tt.took)
				}
				if (conn != nil) != (tt.failure == "") || at != tt.at {
					t.Errorf("%v to target %d, %v", conn, at, err)
				}
				if tt.failure != "" && !strings.HasPrefix(err.Error(), tt.failure+": ") {
					t.Errorf("error %q, want %s", err, tt.failure)
				}
				if err != nil && strings.Count(err.Error(), ";") != tt.reasons-1 {
					t.Errorf("reason %q, want %d", err, tt.reasons)
				}
				for _, c := range made {
					select {
					case <-c.done:
						if c == conn {
							t.Error("what answered was closed")
						}
					default:
						if c != conn {
							t.Errorf("a connection to %v is left behind", c.to)
						}
					}
				}
			})
		})
	}
}

// A dialled connection that is closed before anything else was done with it, as where the
// attempt was given up or the process was killed, is no empty transfer to the server.
func TestDialGuestIsAbortive(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, c := range []struct {
		close func(net.Conn)
		reset bool
	}{{func(c net.Conn) { _ = c.Close() }, true}, {CloseOrderly, false}} {
		conn, err := DialGuest(t.Context(), "tcp", l.Addr().(*net.TCPAddr).AddrPort())
		if err != nil {
			t.Fatal(err)
		}
		server, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		c.close(conn)
		_ = server.SetDeadline(time.Now().Add(patience))
		if _, err := io.ReadAll(server); errors.Is(err, errConnReset) != c.reset {
			t.Errorf("reset %v: %v", c.reset, err)
		}
	}
}

func TestLosingConnectionIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var made []*closed
		var mu sync.Mutex
		s, err := NewServer(ServerOptions{Dial: func(_ context.Context, _ string, to netip.AddrPort) (net.Conn, error) {
			if to.Port() == 1 {
				time.Sleep(attemptDelay)
			}
			time.Sleep(time.Second) // ignoring the context
			c := &closed{to: to, done: make(chan struct{})}
			mu.Lock()
			defer mu.Unlock()
			made = append(made, c)
			return c, nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		conn, _, err := s.dial(t.Context(), "tcp", []netip.AddrPort{
			netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.1:2"),
		}, Request{})
		if err != nil || len(made) != 2 {
			t.Fatalf("%d connections, %v", len(made), err)
		}
		for _, c := range made {
			select {
			case <-c.done:
				if c == conn {
					t.Error("what was returned is closed")
				}
			default:
				if c != conn {
					t.Error("the other is open")
				}
			}
		}
	})
}

func TestNoDialAfterCancel(t *testing.T) {
	s, err := NewServer(ServerOptions{Dial: func(context.Context, string, netip.AddrPort) (net.Conn, error) {
		t.Error("dialled")
		return nil, errors.New("dialled")
	}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := s.dial(ctx, "tcp", []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:1")}, Request{}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
