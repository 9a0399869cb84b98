// SPDX-License-Identifier: Apache-2.0

//go:build unix

package link

import (
	"bytes"
	"io"
	"testing"

	"github.com/fairlead/fairlead/internal/link/wire"
)

// chunkOf is a chunk of n bytes, with room for its header.
func chunkOf(n, number int) []byte {
	return append(make([]byte, wire.ChunkHeader), bytes.Repeat([]byte{byte(number)}, n)...)
}

func TestTryChunk(t *testing.T) {
	agent, host, _ := connected(t)
	atAgent, atHost := flow(t, agent, host)
	c := atHost.(*flowConn)
	const size = 50_001
	sent, rest := 0, []byte(nil)
	for {
		frame := chunkOf(size, sent)
		n := c.TryChunk(frame)
		if n == 0 {
			break
		}
		sent++
		if n < len(frame) {
			rest = frame[n:]
			if m := c.TryChunk(chunkOf(1, 0)); m != 0 {
				t.Fatalf("%d bytes went into the middle of a chunk", m)
			}
			break
		}
	}
	if sent == 0 {
		t.Fatal("nothing was taken")
	}
	got := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(atAgent)
		got <- b
	}()
	if rest != nil {
		n, err := c.Raw().Write(rest)
		if err := c.Wrote(n, err); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Write([]byte("last")); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n := c.TryChunk(chunkOf(1, 0)); n != 0 {
		t.Errorf("%d bytes went after the end", n)
	}
	b := <-got
	for i := range sent {
		if len(b) < size || !bytes.Equal(b[:size], chunkOf(size, i)[wire.ChunkHeader:]) {
			t.Fatalf("chunk %d of %d did not arrive as it was sent; %d bytes are left", i, sent, len(b))
		}
		b = b[size:]
	}
	if string(b) != "last" {
		t.Errorf("then came %d bytes, want last", len(b))
	}
}

func TestTryChunkDuringWrite(t *testing.T) {
	agent, host, _ := connected(t)
	_, atHost := flow(t, agent, host)
	c := atHost.(*flowConn)
	c.writing.Lock()
	n := c.TryChunk(chunkOf(1, 0))
	c.writing.Unlock()
	if n != 0 {
		t.Errorf("%d bytes went", n)
	}
	if err := c.Reset(); err != nil {
		t.Fatal(err)
	}
	if n := c.TryChunk(chunkOf(1, 0)); n != 0 {
		t.Errorf("%d bytes went after a reset", n)
	}
}
