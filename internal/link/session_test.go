// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/libp2p/go-yamux/v5"

	"github.com/fairlead/fairlead/internal/link/wire"
)

func TestControlStream(t *testing.T) {
	for name, dials := range map[string]Role{"host dials": RoleHost, "agent dials": RoleAgent} {
		t.Run(name, func(t *testing.T) {
			other := RoleAgent
			if dials == RoleAgent {
				other = RoleHost
			}
			a, b := sockets(t)
			d, l := shake(t, opts(t, dials), opts(t, other), a, b)
			if d.err != nil || l.err != nil {
				t.Fatal(d.err, l.err)
			}
			agent, host := d.s, l.s
			if dials == RoleHost {
				agent, host = l.s, d.s
			}
			told(t, agent, host)
			told(t, host, agent)
			g, h := flow(t, agent, host)
			echoed(t, h, g)
			echoed(t, g, h)
			if _, err := agent.Open(ctx10(t)); err == nil {
				t.Error("the agent opened a stream")
			}
			if _, err := host.Accept(ctx10(t)); err == nil {
				t.Error("the host accepted streams")
			}
			// Nor can an agent that does not play by the rules.
			st, err := agent.(*session).mux.OpenStream(ctx10(t))
			if err == nil {
				_, err = st.Read(make([]byte, 1))
			}
			if !errors.Is(err, yamux.ErrStreamReset) {
				t.Errorf("stream from the agent: %v", err)
			}
		})
	}
}

// told sends a control message from one end to the other.
func told(t testing.TB, from, to Session) {
	t.Helper()
	frame, err := wire.EncodeFrame(&wire.Frame{Table: "word"})
	if err != nil {
		t.Fatal(err)
	}
	if err := from.Control().Write(ctx10(t), frame); err != nil {
		t.Fatal(err)
	}
	body, err := to.Control().Read(ctx10(t))
	if err != nil || string(body) != `{"table":"word"}` {
		t.Fatalf("got %q, %v", body, err)
	}
}

// echoed sends a few bytes from one end to the other.
func echoed(t *testing.T, from, to Stream) {
	t.Helper()
	if _, err := from.Write([]byte("word")); err != nil {
		t.Fatal(err)
	}
	var b [4]byte
	if _, err := io.ReadFull(to, b[:]); err != nil || string(b[:]) != "word" {
		t.Fatalf("got %q, %v", b, err)
	}
}

func TestHalfClose(t *testing.T) { eachKind(t, flowHalfClose) }

func flowHalfClose(t *testing.T, agent, host Session) {
	g, h := flow(t, agent, host)
	if _, err := h.Write([]byte("request")); err != nil {
		t.Fatal(err)
	}
	if err := h.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(g); err != nil || string(b) != "request" {
		t.Fatalf("got %q, %v", b, err)
	}
	if _, err := h.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after CloseWrite: %v", err)
	}
	reply := bytes.Repeat([]byte("reply"), 200_000) // more than a window
	go func() {
		_, _ = g.Write(reply)
		_ = g.Close()
	}()
	if b, err := io.ReadAll(h); err != nil || !bytes.Equal(b, reply) {
		t.Fatalf("%d bytes of reply, %v", len(b), err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}

func TestReset(t *testing.T) { eachKind(t, flowReset) }

func flowReset(t *testing.T, agent, host Session) {
	g, h := flow(t, agent, host)
	if _, err := h.Write([]byte("lost")); err != nil {
		t.Fatal(err)
	}
	if err := h.Reset(); err != nil {
		t.Fatal(err)
	}
	for name, st := range map[string]Stream{"ours": h, "theirs": g} {
		if _, err := io.Copy(io.Discard, st); !errors.Is(err, ErrReset) {
			t.Errorf("%s: read: %v", name, err)
		}
		if _, err := st.Write([]byte("x")); !errors.Is(err, ErrReset) {
			t.Errorf("%s: write: %v", name, err)
		}
		if err := st.Close(); err != nil {
			t.Errorf("%s: close: %v", name, err)
		}
	}
	// The session is none the worse.
	g, h = flow(t, agent, host)
	echoed(t, h, g)
}

func TestResetUnblocks(t *testing.T) { eachKind(t, flowResetUnblocks) }

func flowResetUnblocks(t *testing.T, agent, host Session) {
	g, h := flow(t, agent, host)
	errs := make(chan error, 2)
	go func() { _, err := g.Read(make([]byte, 1)); errs <- err }()
	go func() { _, err := io.Copy(g, zeroReader{}); errs <- err }()
	if _, err := io.ReadFull(h, make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	_ = h.Reset()
	for range 2 {
		if err := <-errs; !errors.Is(err, ErrReset) {
			t.Error(err)
		}
	}
}

type zeroReader struct{}

func (zeroReader) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestDeadlines(t *testing.T) { eachKind(t, flowDeadlines) }

func flowDeadlines(t *testing.T, agent, host Session) {
	g, h := flow(t, agent, host)
	_ = g.SetReadDeadline(time.Now().Add(-time.Second))
	if _, err := g.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	_ = g.SetDeadline(time.Time{})
	echoed(t, h, g)
	_ = h.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := io.Copy(h, zeroReader{}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
}

func TestUseAfterClose(t *testing.T) { eachKind(t, flowUseAfterClose) }

func flowUseAfterClose(t *testing.T, agent, host Session) {
	g, h := flow(t, agent, host)
	read := make(chan error, 1)
	go func() { _, err := h.Read(make([]byte, 1)); read <- err }()
	for range 2 {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := <-read; !errors.Is(err, net.ErrClosed) {
		t.Errorf("read under way: %v", err)
	}
	if _, err := h.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("read: %v", err)
	}
	if _, err := h.Write(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write: %v", err)
	}
	if _, err := g.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the peer reads %v", err)
	}
}

// What throws away the rest after Close reads too, and yamux wakes only one of
// two readers: the one under way must not be left asleep.
func TestCloseUnblocksRead(t *testing.T) { eachKind(t, flowCloseUnblocksRead) }

func flowCloseUnblocksRead(t *testing.T, agent, host Session) {
	for range 300 {
		g, h := flow(t, agent, host)
		read := make(chan error, 1)
		var wg sync.WaitGroup
		wg.Go(func() { _, err := h.Read(make([]byte, 1)); read <- err })
		wg.Go(func() { _ = h.SetReadDeadline(time.Now().Add(time.Hour)) })
		wg.Go(func() { _ = h.Close() })
		wg.Go(func() { _ = g.Close() })
		select {
		case err := <-read:
			if !errors.Is(err, net.ErrClosed) && err != io.EOF {
				t.Fatalf("read under way: %v", err)
			}
		case <-time.After(2 * time.Minute):
			t.Fatal("the read under way never ends")
		}
		wg.Wait()
		if err := h.SetReadDeadline(time.Now()); !errors.Is(err, net.ErrClosed) {
			t.Fatalf("deadline after close: %v", err)
		}
	}
}

// A peer that continues to write after our Close does not hang.
func TestCloseWhilePeerWrites(t *testing.T) {
	for name, stops := range map[string]bool{"it ends": true, "it never ends": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				agent, host := pipeSessions(t)
				g, h := flow(t, agent, host)
				if _, err := h.Write([]byte("last words")); err != nil {
					t.Fatal(err)
				}
				if err := h.Close(); err != nil {
					t.Fatal(err)
				}
				var err error
				if stops {
					_, err = io.CopyN(g, zeroReader{}, 4<<20)
				} else {
					for err == nil {
						_, err = g.Write(make([]byte, 1000))
						time.Sleep(time.Second)
					}
					if !errors.Is(err, ErrReset) {
						t.Error(err)
					}
					err = nil
				}
				if err != nil {
					t.Error(err)
				}
				if stops {
					if b, err := io.ReadAll(g); err != nil || string(b) != "last words" {
						t.Errorf("got %q, %v", b, err)
					}
				}
				_ = g.Close()
				synctest.Wait()
				for _, s := range []Session{agent, host} {
					if n := s.(*session).mux.NumStreams(); n != 0 {
						t.Errorf("%d streams left", n)
					}
				}
			})
		})
	}
}

// pipeSessions are for synctest, which cannot see through sockets.
func pipeSessions(t *testing.T, edit ...func(o *Options)) (agent, host Session) {
	t.Helper()
	a, b := net.Pipe()
	ao, ho := opts(t, RoleAgent), opts(t, RoleHost)
	for _, f := range edit {
		f(&ao)
		f(&ho)
	}
	c := make(chan result, 1)
	go func() {
		s, err := Server(context.Background(), b, ao)
		c <- result{s, err}
	}()
	host, err := Client(context.Background(), a, ho)
	r := <-c
	if err != nil || r.err != nil {
		t.Fatal(err, r.err)
	}
	t.Cleanup(func() { _, _ = host.Close(), r.s.Close() })
	return r.s, host
}

func TestCloseReason(t *testing.T) {
	for _, reason := range []Reason{ReasonShutdown, ReasonReplaced, ReasonSilent, ReasonProtocol, 99} {
		eachKind(t, func(t *testing.T, agent, host Session) { closeTellsWhy(t, reason, agent, host) })
	}
}

func closeTellsWhy(t *testing.T, reason Reason, agent, host Session) {
	{
		g, _ := flow(t, agent, host)
		if agent.Err() != nil {
			t.Errorf("an error before the end: %v", agent.Err())
		}
		if err := host.CloseWith(reason); err != nil {
			t.Error(err)
		}
		_ = host.CloseWith(ReasonSilent) // too late to count
		<-agent.Done()
		var near, far *CloseError
		if !errors.As(host.Err(), &near) || near.Reason != reason || near.Remote {
			t.Errorf("%s: this side says %v", reason, host.Err())
		}
		if !errors.As(agent.Err(), &far) || far.Reason != reason || !far.Remote {
			t.Errorf("%s: the other side says %v", reason, agent.Err())
		}
		for _, err := range []error{agent.Err(), host.Err()} {
			if !errors.Is(err, ErrClosed) {
				t.Errorf("%v is not ErrClosed", err)
			}
		}
		if _, err := g.Read(make([]byte, 1)); !errors.Is(err, ErrClosed) || errors.Is(err, ErrReset) {
			t.Errorf("read: %v", err)
		}
		if _, err := g.Write(make([]byte, 1)); !errors.Is(err, ErrClosed) {
			t.Errorf("write: %v", err)
		}
		if _, err := agent.Accept(ctx10(t)); !errors.Is(err, ErrClosed) {
			t.Errorf("accept: %v", err)
		}
		if _, err := host.Open(ctx10(t)); !errors.Is(err, ErrClosed) {
			t.Errorf("open: %v", err)
		}
	}
}

func TestLostConnection(t *testing.T) { eachKind(t, flowLostConnection) }

func flowLostConnection(t *testing.T, agent, host Session) {
	g, _ := flow(t, agent, host)
	_ = host.(*session).conn.Close()
	<-agent.Done()
	if err := agent.Err(); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if _, err := g.Read(make([]byte, 1)); !errors.Is(err, ErrClosed) || errors.Is(err, ErrReset) {
		t.Error(err)
	}
}

func TestAcceptAndOpenEndWithContext(t *testing.T) {
	agent, host := sessions(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := agent.Accept(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := host.Open(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	g, h := flow(t, agent, host)
	_, _ = g, h
}

func TestManyStreams(t *testing.T) {
	agent, host := sessions(t)
	const n = 1000
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for range n {
			st, err := agent.Accept(ctx10(t))
			if err != nil {
				t.Error(err)
				return
			}
			wg.Go(func() {
				if _, err := io.Copy(st, st); err != nil {
					t.Error(err)
				}
				_ = st.CloseWrite()
			})
		}
	})
	// All are open at once before the first one talks.
	streams := make([]Stream, n)
	for i := range streams {
		var err error
		if streams[i], err = host.Open(ctx10(t)); err != nil {
			t.Fatal(err)
		}
	}
	for i, st := range streams {
		wg.Go(func() {
			msg := bytes.Repeat(fmt.Appendf(nil, "%d,", i), 5000)
			go func() {
				_, _ = st.Write(msg)
				_ = st.CloseWrite()
			}()
			if b, err := io.ReadAll(st); err != nil || !bytes.Equal(b, msg) {
				t.Errorf("stream %d: %d bytes of %d, %v", i, len(b), len(msg), err)
			}
			_ = st.Close()
		})
	}
}

func TestStreamLimit(t *testing.T) {
	agent, host := sessions(t, func(a, _ *Options) { a.MaxStreams = 3 })
	for range 3 {
		flow(t, agent, host)
	}
	st, err := host.Open(ctx10(t))
	if err == nil {
		_, err = st.Read(make([]byte, 1))
	}
	if !errors.Is(err, ErrReset) {
		t.Errorf("one stream too many: %v", err)
	}
	told(t, host, agent)
}

// The agent may open nothing: what a hostile one tries is reset and forgotten.
func TestHostRefusesStreams(t *testing.T) {
	agent, host := sessions(t)
	const tries = 100_000
	ctx := t.Context()
	for i := range tries {
		st, err := agent.(*session).mux.OpenStream(ctx)
		if err != nil {
			t.Fatalf("try %d: %v", i, err)
		}
		_, _ = st.Write([]byte("x"))
		if i%1000 == 0 {
			if _, err := st.Read(make([]byte, 1)); err == nil {
				t.Fatal("the host answered")
			}
		}
	}
	if n := host.(*session).mux.NumStreams(); n > 0 {
		t.Errorf("the host holds %d streams, want none", n)
	}
	told(t, host, agent)
	g, h := flow(t, agent, host)
	echoed(t, h, g)
}

// countConn counts writes: each would wake an idle process.
type countConn struct {
	net.Conn
	writes atomic.Int64
}

func (c *countConn) Write(b []byte) (int, error) { c.writes.Add(1); return c.Conn.Write(b) }

func TestIdleSessionTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := net.Pipe()
		ca, cb := &countConn{Conn: a}, &countConn{Conn: b}
		c := make(chan result, 1)
		go func() {
			s, err := Server(context.Background(), cb, opts(t, RoleAgent))
			c <- result{s, err}
		}()
		host, err := Client(context.Background(), ca, opts(t, RoleHost))
		agent := <-c
		if err != nil || agent.err != nil {
			t.Fatal(err, agent.err)
		}
		time.Sleep(time.Minute)
		before := ca.writes.Load() + cb.writes.Load()
		time.Sleep(time.Hour)
		if n := ca.writes.Load() + cb.writes.Load() - before; n == 0 || n > 2*2*121 {
			t.Errorf("%d writes in an idle hour", n)
		}
		_, _ = host.Close(), agent.s.Close()
	})
}

// stallConn is a connection that at some time carries nothing any more.
type stallConn struct {
	net.Conn
	stalled atomic.Bool
	block   bool // writes wait, as with a peer that does not read
	once    sync.Once
	end     chan struct{}
}

func (c *stallConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.stalled.Load() && err == nil {
		<-c.end
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *stallConn) Write(b []byte) (int, error) {
	if !c.stalled.Load() {
		return c.Conn.Write(b)
	}
	if c.block {
		<-c.end
		return 0, net.ErrClosed
	}
	return len(b), nil
}

func (c *stallConn) Close() error {
	c.once.Do(func() { close(c.end) })
	return c.Conn.Close()
}

// stalling makes a session whose agent's connection can be stalled.
func stalling(t *testing.T, block bool) (agent, host Session, c *stallConn) {
	t.Helper()
	a, b := net.Pipe()
	c = &stallConn{Conn: b, block: block, end: make(chan struct{})}
	ch := make(chan result, 1)
	go func() {
		s, err := Server(context.Background(), c, opts(t, RoleAgent))
		ch <- result{s, err}
	}()
	host, err := Client(context.Background(), a, opts(t, RoleHost))
	r := <-ch
	if err != nil || r.err != nil {
		t.Fatal(err, r.err)
	}
	return r.s, host, c
}

func TestSilentPeerEndsTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		agent, host, c := stalling(t, false)
		time.Sleep(time.Second)
		begin := time.Now()
		c.stalled.Store(true)
		<-agent.Done()
		if d := time.Since(begin); d > time.Minute {
			t.Errorf("noticed after %s", d)
		}
		if err := agent.Err(); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		_, _ = agent.Close(), host.Close()
	})
}

func TestCloseDoesNotWaitForAStalledPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		agent, host, c := stalling(t, true)
		time.Sleep(time.Second)
		c.stalled.Store(true)
		go func() { _ = agent.Control().Write(context.Background(), make([]byte, 100)) }() // never leaves
		synctest.Wait()
		begin := time.Now()
		if err := agent.CloseWith(ReasonSilent); err != nil {
			t.Error(err)
		}
		if d := time.Since(begin); d > closeWait {
			t.Errorf("took %s", d)
		}
		_ = host.Close()
	})
}

// stuckConn is a connection whose Close does not return before it may.
type stuckConn struct {
	net.Conn
	once     sync.Once
	closing  chan struct{}
	may      chan struct{}
	received atomic.Int64
}

func (c *stuckConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.received.Add(int64(n))
	return n, err
}

func (c *stuckConn) Close() error {
	c.once.Do(func() { close(c.closing) })
	<-c.may
	return c.Conn.Close()
}

// A session is lost before its streams learn it. What they read until then, and after
// that, does not end like what was sent completely.
func TestLostSessionIsNotTheEndOfAStream(t *testing.T) {
	a, b := sockets(t)
	stuck := &stuckConn{Conn: a, closing: make(chan struct{}), may: make(chan struct{})}
	release := sync.OnceFunc(func() { close(stuck.may) })
	defer release()
	host, agent := shake(t, opts(t, RoleHost), opts(t, RoleAgent), stuck, b)
	if err := errors.Join(host.err, agent.err); err != nil {
		t.Fatal(err)
	}
	in, err := host.s.Open(ctx10(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	out, err := agent.s.Accept(ctx10(t))
	if err != nil {
		t.Fatal(err)
	}
	const size = 200 << 10 // most of the window
	if _, err := out.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	for stuck.received.Load() < size {
		time.Sleep(time.Millisecond)
	}
	_ = b.Close()
	<-stuck.closing
	buf := make([]byte, size)
	for got := 0; got < size; {
		n, err := in.Read(buf)
		got += n
		if errors.Is(err, io.EOF) {
			t.Fatalf("after %d bytes: %v", got, err)
		}
		if err != nil && n == 0 {
			break
		}
	}
	if _, err := in.Write(buf); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a write returned %v", err)
	}
	release()
	if n, err := in.Read(buf); n > 0 || err == nil || errors.Is(err, io.EOF) {
		t.Errorf("in the end it read %d bytes and %v", n, err)
	}
}
