// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/testkit/wait"
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
	synctest.Test(t, func(t *testing.T) {
		r := startInMemory(t, newAuthority(t, "test"), nil)
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
	})
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

// relay passes connections on until it is silenced. Then it drops all bytes.
// It is for tests in fake time.
type relay struct {
	dialServer dialFunc
	silent     atomic.Bool
}

// silence waits first until nothing is under way.
func (r *relay) silence() {
	synctest.Wait()
	r.silent.Store(true)
}

func (r *relay) dial(ctx context.Context, network, address string) (net.Conn, error) {
	far, err := r.dialServer(ctx, network, address)
	if err != nil {
		return nil, err
	}
	near, inner := net.Pipe()
	go r.pass(inner, far)
	go r.pass(far, inner)
	return near, nil
}

func (r *relay) pass(to, from net.Conn) {
	b := make([]byte, 4<<10)
	for {
		n, err := from.Read(b)
		if !r.silent.Load() {
			if err == nil {
				_, err = to.Write(b[:n])
			}
			if err != nil {
				_, _ = to.Close(), from.Close()
			}
		}
		if err != nil {
			return
		}
	}
}

// Both sides find a peer that vanished within two keep-alives.
func TestBlackHole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const keepAlive = 2 * time.Second
		r := startInMemory(t, newAuthority(t, "test"), func(o *ServerOptions) { o.Link.KeepAlive = keepAlive })
		hole := &relay{dialServer: r.dial}
		host, agent := r.connect(r.dialer(func(o *DialOptions) { o.dial, o.Link.KeepAlive = hole.dial, keepAlive }))
		carry(t, host, agent, []byte("hello"))
		hole.silence()
		began := time.Now()
		wait.For(t, "end of the host's session", host.Done())
		wait.For(t, "end of the agent's session", agent.Done())
		if took := time.Since(began); took > 2*keepAlive {
			t.Errorf("found after %v", took)
		}
	})
}

// An agent whose server does not know that it lost the connection gets its place back.
func TestAgentReturnsFromABlackHole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startInMemory(t, newAuthority(t, "test"), nil)
		hole := &relay{dialServer: r.dial}
		old, _ := r.connect(r.dialer(func(o *DialOptions) { o.dial = hole.dial }))
		hole.silence()
		began := time.Now()
		host, agent := r.connect(r.dialer(nil)) // another process: the old one must be asked first
		if took := time.Since(began); took != aliveTime {
			t.Errorf("replaced after %v, want %v", took, aliveTime)
		}
		wait.For(t, "end of the old session", old.Done())
		carry(t, host, agent, []byte("hello"))
	})
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
