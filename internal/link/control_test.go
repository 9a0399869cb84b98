// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/link/wire"
)

// messageOf is a control message of about n bytes.
func messageOf(t testing.TB, n int) []byte {
	t.Helper()
	frame, err := wire.EncodeFrame(&wire.Frame{Table: strings.Repeat("x", n)})
	if err != nil {
		t.Fatal(err)
	}
	return frame
}

// Control messages arrive whole and in order beside flows that are streams, also those of which
// the connection takes only a part at once.
func TestControlBesideFlows(t *testing.T) {
	agent, host := sessions(t)
	for range 3 {
		g, h := flow(t, agent, host)
		go func() { _, _ = io.Copy(g, zeroReader{}) }()
		go func() { _, _ = io.Copy(h, zeroReader{}) }()
		go func() { _, _ = io.Copy(io.Discard, g) }()
		go func() { _, _ = io.Copy(io.Discard, h) }()
	}
	const messages = 300
	begun := 0
	go func() {
		r := rand.New(rand.NewPCG(1, 2))
		for i := range messages {
			frame := messageOf(t, i+r.IntN(500_000))
			rest := agent.Control().Try(frame)
			if len(rest) > 0 && len(rest) < len(frame) {
				begun++
			}
			if len(rest) > 0 {
				if err := agent.Control().Write(t.Context(), rest); err != nil {
					t.Error(err)
					return
				}
			}
		}
	}()
	r := rand.New(rand.NewPCG(1, 2))
	for i := range messages {
		body, err := host.Control().Read(ctx10(t))
		if want := messageOf(t, i+r.IntN(500_000))[recordHead:]; err != nil || !bytes.Equal(body, want) {
			t.Fatalf("message %d: %d bytes, %v; want %d bytes", i, len(body), err, len(want))
		}
	}
	told(t, host, agent)
	if begun == 0 {
		t.Error("no message was sent in part")
	}
}

// A message that is too large ends control, and its reader learns why.
func TestOversizedControlMessage(t *testing.T) {
	agent, host := sessions(t)
	m := agent.(*session).records
	if _, err := m.Conn.Write(binary.BigEndian.AppendUint32(nil, wire.MaxControlFrame+1)); err != nil {
		t.Fatal(err)
	}
	if _, err := host.Control().Read(ctx10(t)); !errors.Is(err, wire.ErrTooLarge) {
		t.Errorf("got %v", err)
	}
	if err := host.CloseWith(ReasonProtocol); err != nil {
		t.Error(err)
	}
	<-agent.Done()
	var c *CloseError
	if !errors.As(agent.Err(), &c) || c.Reason != ReasonProtocol {
		t.Errorf("the agent received %v", agent.Err())
	}
}

// Messages that nobody reads hold up no Close, and a write that nobody takes ends with its context.
func TestUnreadControl(t *testing.T) {
	agent, host := sessions(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	wrote := make(chan struct{}, 1000)
	go func() {
		frame := messageOf(t, 500_000)
		for {
			if err := agent.Control().Write(ctx, frame); err != nil {
				ended <- err
				return
			}
			wrote <- struct{}{}
		}
	}()
	for range 2 {
		<-wrote
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("no error")
	}
	_ = host.Close()
	_ = agent.Close()
}

// Whatever comes, records are read without a panic, and in bounds.
func FuzzRecords(f *testing.F) {
	f.Add([]byte("\x80\x00\x00\x02ab\x00\x00\x00\x02{}"))
	f.Add([]byte("\x80\x00\x00\x00\x80\x00\x00\x01a"))
	f.Add([]byte("\xff\xff\xff\xff\x00"))
	f.Add([]byte("\x00\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		near, far := net.Pipe()
		go func() { _, _ = far.Write(b); _ = far.Close() }()
		c := newMixed(near, near)
		go func() {
			for {
				m, ok := c.inbox.get()
				switch {
				case len(m.body) > len(b):
					t.Errorf("a message of %d bytes", len(m.body))
				case m.err != nil:
					_ = c.Close()
				case !ok:
					select {
					case <-c.inbox.news:
					case <-c.done:
						return
					}
				}
			}
		}()
		total := 0
		for {
			n, err := c.Read(make([]byte, 7))
			total += n
			if err != nil {
				break
			}
		}
		if total > len(b) {
			t.Errorf("%d bytes of %d", total, len(b))
		}
		_ = c.Close()
	})
}

// However small they are, messages that nobody reads take little memory.
func TestInboxOfSmallMessages(t *testing.T) {
	near, _ := net.Pipe()
	c := newMixed(near, near)
	defer c.Close()
	n := 0
	for n < 1_000_000 && c.inbox.put(message{}) {
		n++
	}
	if n > 50_000 {
		t.Errorf("%d empty messages were kept", n)
	}
}
