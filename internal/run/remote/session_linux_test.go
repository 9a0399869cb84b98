// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/run/exec"
	"github.com/fairlead/fairlead/internal/wire"
)

// stream is one whose agent sends input just when the host tells how the program ended.
type stream struct {
	link.Stream // of a pipe, for the deadlines

	input  *io.PipeReader
	agent  *io.PipeWriter
	late   []byte // what the agent sends then
	closed sync.Once

	mu     sync.Mutex
	kinds  []byte // of the frames sent
	resets int
}

// conn makes a net.Conn a link.Stream without the ends of a stream.
type conn struct{ net.Conn }

func (conn) CloseWrite() error { return nil }
func (conn) Reset() error      { return nil }

func newStream(t *testing.T, late []byte) *stream {
	a, b := net.Pipe()
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	s := &stream{Stream: conn{a}, late: late}
	s.input, s.agent = io.Pipe()
	return s
}

func (s *stream) Read(b []byte) (int, error) { return s.input.Read(b) }

func (s *stream) Write(b []byte) (int, error) {
	kind := b[binary.Size(uint32(0))]
	s.mu.Lock()
	s.kinds = append(s.kinds, kind)
	s.mu.Unlock()
	if kind == Exit && len(s.late) > 0 {
		for range 6 { // once one is read, the frame before has been handled
			if _, err := s.agent.Write(s.late); err != nil {
				return 0, link.ErrReset
			}
		}
	}
	return len(b), nil
}

// Close ends the reader, as that of a link's stream.
func (s *stream) Close() error {
	s.closed.Do(func() { _ = s.input.Close() })
	return nil
}

func (s *stream) Reset() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resets++
	return s.input.CloseWithError(link.ErrReset)
}

// How a program ended reaches the agent, also if it sends input that nobody reads any more: a
// stream that is reset loses what was sent on it.
func TestEndIsNotLost(t *testing.T) {
	var late bytes.Buffer
	if err := wire.WriteRunFrame(&late, Stdin, make([]byte, wire.MaxRunFrame)); err != nil {
		t.Fatal(err)
	}
	for what, input := range map[string][]byte{"no input": nil, "late input": late.Bytes()} {
		t.Run(what, func(t *testing.T) {
			e := entry(t, "true", "/bin/true")
			j, err := exec.Start(exec.Program{Path: e.Path, SHA256: e.SHA256, Dir: "/"})
			if err != nil {
				t.Fatal(err)
			}
			defer j.Close()
			st := newStream(t, input)
			c := session{stream: st, job: j, leave: func() {}, wake: make(chan struct{}, 1)}
			how, gone, err := c.serve(context.Background())
			if how != "exit 0" || gone || err != nil {
				t.Errorf("%q, %v, %v", how, gone, err)
			}
			if st.resets != 0 || !slices.Equal(st.kinds, []byte{Answer, Exit}) {
				t.Errorf("%d resets after frames %q, want none", st.resets, st.kinds)
			}
		})
	}
}
