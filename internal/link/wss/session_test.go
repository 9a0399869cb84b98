// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/test/kit/wait"
)

func reasonOf(t *testing.T, s link.Session) link.Reason {
	t.Helper()
	wait.For(t, "end of the session", s.Done())
	var closed *link.CloseError
	if !errors.As(s.Err(), &closed) {
		return 0
	}
	return closed.Reason
}

// The agent that is connected and answers keeps its name.
func TestNameIsTaken(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	host, agent := r.connect(r.dialer(nil))
	second, err := r.dialer(nil).Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := reasonOf(t, second); got != link.ReasonDuplicate || !link.Unwelcome(second.Err()) {
		t.Errorf("closed for %v: %v", got, second.Err())
	}
	carry(t, host, agent, []byte("hello"))
	// When it has left, the name is free.
	_ = agent.Close()
	wait.For(t, "end of the session", host.Done())
	host, agent = r.connect(r.dialer(nil))
	carry(t, host, agent, []byte("hello"))
}

// The same process, which dials again after it lost its connection, gets its place back
// although the server has not noticed the loss.
func TestSameAgentReplacesItself(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	d := r.dialer(nil)
	old, _ := r.connect(d)
	host, agent := r.connect(d)
	wait.For(t, "end of the old session", old.Done())
	carry(t, host, agent, []byte("hello"))
}

// relay passes connections on until it is silenced, which neither side is told.
type relay struct {
	ln net.Listener

	mu     sync.Mutex
	silent bool
	conns  []net.Conn
}

func newRelay(t *testing.T, to string) *relay {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{ln: ln}
	t.Cleanup(func() {
		_ = ln.Close()
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, c := range r.conns {
			_ = c.Close()
		}
	})
	go func() {
		for {
			near, err := ln.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				_ = near.Close()
				continue
			}
			r.mu.Lock()
			r.conns = append(r.conns, near, far)
			r.mu.Unlock()
			go r.pass(near, far)
			go r.pass(far, near)
		}
	}()
	return r
}

func (r *relay) pass(to, from net.Conn) {
	b := make([]byte, 4<<10)
	for {
		n, err := from.Read(b)
		r.mu.Lock()
		silent := r.silent
		r.mu.Unlock()
		if silent {
			return
		}
		if _, werr := to.Write(b[:n]); err != nil || werr != nil {
			_ = to.Close()
			return
		}
	}
}

func (r *relay) silence() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.silent = true
}

func (r *relay) server() string {
	_, port, _ := net.SplitHostPort(r.ln.Addr().String())
	return "localhost:" + port
}

// Both sides find a peer that vanished within two keep-alives.
func TestBlackHole(t *testing.T) {
	const keepAlive = 2 * time.Second
	r := start(t, newAuthority(t, "test"), func(o *ServerOptions) { o.Link.KeepAlive = keepAlive })
	hole := newRelay(t, r.ln.Addr().String())
	host, agent := r.connect(r.dialer(func(o *DialOptions) { o.Server, o.Link.KeepAlive = hole.server(), keepAlive }))
	carry(t, host, agent, []byte("hello"))
	hole.silence()
	began := time.Now()
	wait.For(t, "end of the host's session", host.Done())
	wait.For(t, "end of the agent's session", agent.Done())
	// The last bytes may have come just before; a busy machine is late.
	if took := time.Since(began); took > 2*keepAlive+2*time.Second {
		t.Errorf("found after %v", took)
	}
}

// An agent whose server does not know that it lost the connection gets its place back.
func TestAgentReturnsFromABlackHole(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	hole := newRelay(t, r.ln.Addr().String())
	d := r.dialer(func(o *DialOptions) { o.Server = hole.server() })
	old, _ := r.connect(d)
	hole.silence()
	restarted := r.dialer(nil) // another process: the old one must be asked first
	agent, err := restarted.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = agent.Close() }()
	host, err := r.server.Session(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = host.Close() }()
	wait.For(t, "end of the old session", old.Done())
	carry(t, host, agent, []byte("hello"))
}

// A server that restarts under 500 flows: all end, and the agent is back.
func TestRestartUnderFlows(t *testing.T) {
	const flows = 500
	r := start(t, newAuthority(t, "test"), nil)
	ctx, cancel := context.WithCancel(t.Context())
	o := r.dialer(nil).o
	agents := NewRedialer(o)
	var wg sync.WaitGroup
	ended := make(chan error, flows)
	wg.Go(func() {
		for {
			s, err := agents.Accept(ctx)
			if err != nil {
				return
			}
			defer s.Close()
			wg.Go(func() {
				for {
					st, err := s.Accept(ctx)
					if err != nil {
						return
					}
					wg.Go(func() {
						_, err := io.Copy(st, st)
						_ = st.Reset()
						ended <- err
					})
				}
			})
		}
	})
	t.Cleanup(wg.Wait)
	t.Cleanup(cancel)
	host, err := r.server.Session(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	var streams []link.Stream
	for range flows {
		st, err := host.Connect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		streams = append(streams, st)
	}
	for _, st := range streams { // all are open at once
		var b [1]byte
		if _, err := io.ReadFull(st, b[:]); err != nil {
			t.Fatal(err)
		}
	}
	at := r.ln.Addr().String()
	r.stop()
	_ = host.Close() // as the host does
	for range flows {
		if err := wait.For(t, "end of a flow", ended); err == nil {
			t.Error("a flow ended in order")
		}
	}
	server, err := NewServer(r.server.o)
	if err != nil {
		t.Fatal(err)
	}
	r.server = server
	r.serve(at)
	host, err = r.server.Session(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	st, err := host.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Write([]byte("y")); err != nil {
		t.Fatal(err)
	}
	var b [1]byte
	if _, err := io.ReadFull(st, b[:]); err != nil || b[0] != 'y' {
		t.Errorf("%q, %v", b, err)
	}
}
