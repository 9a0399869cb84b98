// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
)

// dialled connects to a listener's socket, past the link.
func dialled(t *testing.T, l *Listener) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", l.e.Path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return c
}

// A peer without the session's key opens no flow, not even by replay of another's
// opening.
func TestForeignFlowIsRefused(t *testing.T) {
	agent, host, l := connected(t)
	s := host.(*session)
	good := func(number uint64) wire.Opening {
		o := wire.Opening{Session: s.keys.id, Number: number}
		copy(o.MAC[:], s.keys.sum(byHost, number))
		return o
	}
	used := good(1 << 20)
	c := dialled(t, l)
	if _, err := c.Write(used.Append(nil)); err != nil {
		t.Fatal(err)
	}
	g, err := agent.Accept(ctx10(t))
	if err != nil {
		t.Fatal(err)
	}
	_ = g.Reset()
	for name, tt := range map[string]struct {
		opening func() wire.Opening
		want    Refusal
	}{
		"said twice": {func() wire.Opening { return used }, RefusedProof},
		"too old":    {func() wire.Opening { return good(1<<20 - numbersBack - 1) }, RefusedProof},
		"number of another": {func() wire.Opening {
			o := good(7)
			o.Number++
			return o
		}, RefusedProof},
		"the agent's own proof": {func() wire.Opening {
			o := good(9)
			copy(o.MAC[:], s.keys.sum(byAgent, 9))
			return o
		}, RefusedProof},
		"no session": {func() wire.Opening {
			o := good(11)
			o.Session[0]++
			return o
		}, RefusedLost},
	} {
		t.Run(name, func(t *testing.T) {
			before := l.Refused()[tt.want]
			o := tt.opening()
			c := dialled(t, l)
			if _, err := c.Write(o.Append(nil)); err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(c); err != nil || len(b) != 0 {
				t.Errorf("it was told %q, %v", b, err)
			}
			for l.Refused()[tt.want] != before+1 { // it counts after the close
				time.Sleep(time.Millisecond)
			}
		})
	}
	s.number.Store(1 << 20)
	g, h := flow(t, agent, host)
	echoed(t, h, g)
}

// Who answers in the agent's place without the key is not believed.
func TestFlowVerifiesTheAgent(t *testing.T) {
	_, host, _ := connected(t)
	s := host.(*session)
	near, far := sockets(t)
	defer func() { _ = far.Close() }()
	c := &flowConn{conn: near, s: s, opening: []byte("opening"), expect: s.keys.sum(byAgent, 5)}
	defer func() { _ = c.Reset() }()
	if _, err := far.Write(append(s.keys.sum(byHost, 5), 0, 0, 0, 1, 'x')); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		_, err := c.Read(make([]byte, 1))
		if r := refusal(t, err); r.Code != RefusedProof {
			t.Error(err)
		}
	}
}

// Flows beyond the limit are closed, and there is room again when some end.
func TestFlowConnectionLimit(t *testing.T) {
	agent, host, l := connected(t, func(a, _ *Options) { a.MaxStreams = 3 })
	var held []Stream
	for range 3 {
		g, _ := flow(t, agent, host)
		held = append(held, g)
	}
	over, err := host.Connect(ctx10(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = over.Write([]byte("x")); err == nil {
		_, err = over.Read(make([]byte, 1))
	}
	if !errors.Is(err, ErrReset) {
		t.Errorf("one too many: %v", err)
	}
	_ = over.Close()
	for l.Refused()[RefusedLost] != 1 { // it counts after the close
		time.Sleep(time.Millisecond)
	}
	_ = held[0].Reset()
	g, h := flow(t, agent, host)
	echoed(t, h, g)
}

// Beyond so many connections flows go on, as streams.
func TestFlowsBeyondTheLimitAreStreams(t *testing.T) {
	agent, host, _ := connected(t)
	s := host.(*session)
	s.mu.Lock()
	for range maxConnections {
		s.flows[&flowConn{conn: new(net.UnixConn)}] = struct{}{}
	}
	s.mu.Unlock()
	g, h := flow(t, agent, host)
	if _, ok := h.(*stream); !ok {
		t.Errorf("it is a %T", h)
	}
	echoed(t, h, g)
}

// A flow that gets no connection is a stream, as long as there is a session.
func TestFailedConnectFallsBackToStream(t *testing.T) {
	agent, host, _ := connected(t)
	host.(*session).dial = func(context.Context) (net.Conn, error) { return nil, errors.New("no descriptors") }
	g, h := flow(t, agent, host)
	echoed(t, h, g)
	_ = host.Close()
	if _, err := host.Connect(ctx10(t)); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// What is killed is not taken for what is done, at whatever point.
func TestLostConnectionIsNotEOF(t *testing.T) {
	for name, tt := range map[string]struct {
		before func(t *testing.T, g, h *flowConn)
		read   string
	}{
		"at once":         {func(*testing.T, *flowConn, *flowConn) {}, ""},
		"between chunks":  {func(t *testing.T, _, h *flowConn) { say(t, h, "abc") }, "abc"},
		"within a chunk":  {func(t *testing.T, _, h *flowConn) { _, _ = h.conn.Write([]byte{0, 0, 0, 9, 'a'}) }, "a"},
		"within a header": {func(t *testing.T, _, h *flowConn) { _, _ = h.conn.Write([]byte{0, 0}) }, ""},
		"after the other's end": {func(t *testing.T, g, h *flowConn) {
			say(t, h, "abc")
			if err := g.CloseWrite(); err != nil {
				t.Error(err)
			}
			if _, err := h.Read(make([]byte, 1)); err != io.EOF {
				t.Error(err)
			}
		}, "abc"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, room := range []int{1, 4096} {
				agent, host, _ := connected(t)
				a, b := flow(t, agent, host)
				g, h := a.(*flowConn), b.(*flowConn)
				tt.before(t, g, h)
				_ = h.conn.Close()
				var got []byte
				var err error
				for err == nil {
					p := make([]byte, room)
					var n int
					n, err = g.Read(p)
					got = append(got, p[:n]...)
				}
				if string(got) != tt.read || !errors.Is(err, ErrReset) {
					t.Errorf("got %q, %v", got, err)
				}
				if _, err = g.NextChunk(); err == nil { // announced, then the connection ends
					n, rerr := g.Raw().Read(make([]byte, 1))
					err = g.Took(n, rerr)
				}
				if !errors.Is(err, ErrReset) {
					t.Errorf("next chunk: %v", err)
				}
			}
		})
	}
}

func say(t *testing.T, s Stream, text string) {
	t.Helper()
	if _, err := s.Write([]byte(text)); err != nil {
		t.Error(err)
	}
}

// A reset is noticed by a peer that neither reads nor writes any more.
func TestResetAfterHalfCloseOfFlow(t *testing.T) {
	agent, host, _ := connected(t)
	g, h := flow(t, agent, host)
	if err := h.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Read(make([]byte, 1)); err != io.EOF {
		t.Fatal(err)
	}
	noticed := make(chan error)
	go func() { noticed <- g.(*flowConn).AwaitReset() }()
	_ = h.Reset()
	if err := <-noticed; !errors.Is(err, ErrReset) {
		t.Error(err)
	}

	// After an end on both sides a close is not a reset, whichever closes first.
	g, h = flow(t, agent, host)
	if err := errors.Join(h.CloseWrite(), g.CloseWrite()); err != nil {
		t.Fatal(err)
	}
	for _, st := range []Stream{g, h} {
		if _, err := st.Read(make([]byte, 1)); err != io.EOF {
			t.Fatal(err)
		}
	}
	_ = h.Close()
	if err := g.(*flowConn).AwaitReset(); err != nil {
		t.Error(err)
	}

	// Nor is a deadline.
	g, h = flow(t, agent, host)
	_ = h.CloseWrite()
	if _, err := g.Read(make([]byte, 1)); err != io.EOF {
		t.Fatal(err)
	}
	_ = g.SetReadDeadline(time.Unix(1, 0))
	if err := g.(*flowConn).AwaitReset(); err != nil {
		t.Error(err)
	}
}

// A peer that sends malformed chunks is reset.
func TestMalformedChunks(t *testing.T) {
	for name, bytes := range map[string][]byte{
		"too large":     {0xff, 0, 0, 0},
		"after the end": {0, 0, 0, 0, 0, 0, 0, 1, 'x'},
	} {
		t.Run(name, func(t *testing.T) {
			for _, room := range []int{1, 4096} {
				agent, host, _ := connected(t)
				g, h := flow(t, agent, host)
				if _, err := h.(*flowConn).conn.Write(bytes); err != nil {
					t.Fatal(err)
				}
				_, err := g.Read(make([]byte, room))
				if err == io.EOF {
					err = g.(*flowConn).AwaitReset()
				}
				if !errors.Is(err, ErrReset) {
					t.Error(err)
				}
			}
		})
	}
}

// Whatever the sizes of writes and of the room to read into, and however they
// are mixed with payload that goes past the stream, it comes out as it went in.
func TestChunkSizes(t *testing.T) {
	agent, host, _ := connected(t)
	a, b := flow(t, agent, host)
	g, h := a.(*flowConn), b.(*flowConn)
	r := rand.New(rand.NewPCG(1, 2))
	in := make([]byte, 3<<20)
	for i := range in {
		in[i] = byte(r.Uint32())
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		w := rand.New(rand.NewPCG(3, 4))
		for rest := in; len(rest) > 0; {
			n := min(len(rest), 1+w.IntN([]int{1, 8, 600, 5000, 70_000}[w.IntN(5)]))
			var err error
			switch w.IntN(3) {
			case 0:
				_, err = h.Write(rest[:n])
			case 1:
				err = h.WriteChunk(append(make([]byte, wire.ChunkHeader), rest[:n]...))
			default:
				var head [wire.ChunkHeader]byte
				if err = h.BeginChunk(head[:], n); err == nil {
					m, werr := h.Raw().Write(append(head[:], rest[:n]...))
					err = h.Wrote(m, werr)
				}
			}
			if err != nil {
				t.Error(err)
				return
			}
			rest = rest[n:]
		}
		if err := h.CloseWrite(); err != nil {
			t.Error(err)
		}
	})
	var out []byte
	var err error
	for err == nil {
		p := make([]byte, 1+r.IntN([]int{1, 8, 600, 5000, 70_000}[r.IntN(5)]))
		var n int
		if r.IntN(2) == 0 {
			n, err = g.Read(p)
		} else if n, err = g.NextChunk(); err == nil {
			n, err = g.Raw().Read(p[:min(len(p), n)])
			err = g.Took(n, err)
		}
		if err == nil || n > 0 && err != io.EOF {
			out = append(out, p[:n]...)
		}
	}
	if err != io.EOF || !bytes.Equal(in, out) {
		t.Errorf("%d bytes of %d, %v", len(out), len(in), err)
	}
	wg.Wait()
}

// A chunk that could not be written whole is not made to look whole.
func TestFailedWriteIsNotEOF(t *testing.T) {
	agent, host, _ := connected(t)
	g, h := flow(t, agent, host)
	_ = h.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
	var err error
	for err == nil {
		_, err = h.Write(make([]byte, 10_000))
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	_ = h.SetDeadline(time.Time{})
	if err := h.CloseWrite(); err == nil {
		t.Error("an end within a chunk")
	}
	_ = h.Close()
	if _, err := io.Copy(io.Discard, g); !errors.Is(err, ErrReset) {
		t.Error(err)
	}
}

func TestFlowNumberReplay(t *testing.T) {
	var u numbers
	for _, tt := range []struct {
		n  uint64
		ok bool
	}{
		{1, true}, {1, false}, {0, true}, {0, false}, {3, true}, {2, true}, {3, false}, {64, true}, {64, false},
		{numbersBack + 10, true}, {9, false}, {11, true}, {11, false}, {numbersBack + 9, true}, {numbersBack + 9, false},
		{1 << 40, true}, {numbersBack + 11, false}, {1<<40 - 1, true}, {1<<40 - 1, false}, {1<<64 - 1, false},
		{1<<64 - 2, true}, {1<<64 - 2, false}, {1<<64 - 3, true}, {1 << 40, false},
	} {
		if ok := u.use(tt.n); ok != tt.ok {
			t.Errorf("%d: %v, want %v", tt.n, ok, tt.ok)
		}
	}
}

// Silent connections, more than there is room for, hold up no flow.
func TestSilentConnectionsBlockNoFlow(t *testing.T) {
	agent, host, l := connected(t, func(a, _ *Options) { a.HandshakeTimeout, a.maxUnproved = time.Hour, 16 })
	for range 40 {
		dialled(t, l)
	}
	g, h := flow(t, agent, host)
	echoed(t, h, g)
	l.mu.Lock()
	n := len(l.unproved)
	l.mu.Unlock()
	if n > 16 {
		t.Errorf("%d unproved connections", n)
	}
}

// Many that come at once are served, though there is not room for all: each has
// its time, which here is as long as a busy machine may need.
func TestManyConcurrentFlows(t *testing.T) {
	agent, host, l := connected(t, func(a, _ *Options) { a.maxUnproved, a.openingTime = 16, time.Hour })
	const n = 500
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			h, err := host.Connect(ctx10(t))
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = h.Reset() }()
			_ = h.SetDeadline(time.Now().Add(time.Minute))
			say(t, h, "x")
			if _, err := io.ReadFull(h, make([]byte, 1)); err != nil {
				t.Error(err)
			}
		})
	}
	for range n {
		g, err := agent.Accept(ctx10(t))
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() { _, _ = io.CopyN(g, g, 1) })
	}
	wg.Wait()
	r := l.Refused()
	delete(r, RefusedLost) // a dial that took longer than connectTime: the session carries its flow
	if len(r) != 0 {
		t.Errorf("refused %v", r)
	}
}

// A session that ended leaves nothing with its listener.
func TestListenerForgetsSessions(t *testing.T) {
	agent, host, l := connected(t)
	g, h := flow(t, agent, host)
	_ = host.Close()
	_, _ = io.Copy(io.Discard, g)
	if _, err := h.Read(make([]byte, 1)); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	_ = agent.Close()
	l.mu.Lock()
	n := len(l.sessions)
	l.mu.Unlock()
	if n != 0 {
		t.Errorf("%d sessions", n)
	}
	if _, err := host.Connect(ctx10(t)); !errors.Is(err, ErrClosed) {
		t.Errorf("connect: %v", err)
	}
}

func TestPayloadBeforeReplyIsRefused(t *testing.T) {
	early := append(make([]byte, wire.ChunkHeader), "data"...)
	wire.PutChunk(early, 4)
	c := &flowConn{early: early}
	if n, err := c.NextChunk(); !errors.Is(err, wire.ErrMalformed) {
		t.Errorf("%d bytes, %v", n, err)
	}
}
