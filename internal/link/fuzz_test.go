// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/fairlead/fairlead/internal/link/wire"
)

// scriptedConn is a connection from which the same bytes come, then the end.
type scriptedConn struct {
	net.Conn
	from io.Reader
}

func (h scriptedConn) Read(b []byte) (int, error) { return h.from.Read(b) }

// FuzzChunks has a flow read whatever a peer may send, with rooms of all sizes:
// the payload is that of the chunks, and only an end that was sent is one.
func FuzzChunks(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 'x', 0, 0, 0, 0}, uint16(1))
	f.Add([]byte{0, 0, 0, 2, 'x', 'y', 0, 0, 0, 1, 'z', 0, 0, 0, 0}, uint16(4096))
	f.Add([]byte{0, 0, 0, 0, 1}, uint16(600))
	f.Add([]byte{0xff, 0, 0, 0, 1}, uint16(600))
	_, host := sessions(f)
	f.Fuzz(func(t *testing.T, in []byte, room uint16) {
		var want []byte
		ended, rest := false, in
		for len(rest) >= wire.ChunkHeader && !ended {
			n, err := wire.Chunk([wire.ChunkHeader]byte(rest))
			if err != nil {
				break
			}
			ended, rest = n == 0, rest[wire.ChunkHeader:]
			n = min(n, len(rest))
			want, rest = append(want, rest[:n]...), rest[n:]
		}
		c := &flowConn{conn: scriptedConn{from: bytes.NewReader(in)}, s: host.(*session)}
		var got []byte
		var err error
		for err == nil {
			p := make([]byte, int(room)+1)
			var n int
			n, err = c.Read(p)
			got = append(got, p[:n]...)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("read %q, want %q", got, want)
		}
		if err == io.EOF != ended && (err == io.EOF || len(rest) == 0) {
			t.Fatalf("said its end: %v; read %v, with %d bytes after it", ended, err, len(rest))
		}
		if err != io.EOF && !errors.Is(err, ErrReset) {
			t.Fatal(err)
		}
	})
}
