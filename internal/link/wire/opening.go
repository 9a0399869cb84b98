// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
)

// FlowMagic is what the host sends first on a connection that is one flow of a
// session, instead of Magic.
const FlowMagic = "FAIRFLOW"

// OpeningSize is the length of an Opening with its magic, in bytes.
const OpeningSize = len(FlowMagic) + SessionIDSize + 8 + MACSize

// SessionIDSize is the length of Opening.Session, in bytes.
const SessionIDSize = 16

// Opening begins a connection that is one flow. The agent answers with the bare
// MAC of its own proof, in front of its first chunk.
type Opening struct {
	Session [SessionIDSize]byte // names the session, and reveals nothing of its key
	Number  uint64              // of the flow: never twice in one session
	MAC     [MACSize]byte       // the host's proof that it has the session's key
}

// Append appends o as it is sent, OpeningSize bytes.
func (o *Opening) Append(b []byte) []byte {
	b = append(b, FlowMagic...)
	b = append(b, o.Session[:]...)
	b = binary.BigEndian.AppendUint64(b, o.Number)
	return append(b, o.MAC[:]...)
}

// ParseOpening reads what Append made: exactly OpeningSize bytes.
func ParseOpening(b []byte) (Opening, error) {
	if len(b) != OpeningSize || string(b[:len(FlowMagic)]) != FlowMagic {
		return Opening{}, malformed("no opening of a flow")
	}
	var o Opening
	b = b[len(FlowMagic):]
	b = b[copy(o.Session[:], b):]
	o.Number = binary.BigEndian.Uint64(b)
	copy(o.MAC[:], b[8:])
	return o, nil
}

// On a connection that is one flow, what each side sends runs in chunks: the
// length in ChunkHeader bytes, big-endian, then as many bytes, at most MaxChunk.
// Length 0 is the end of what that side sends, and nothing follows it. A
// connection that closes before both sides have sent their end was reset.
const (
	ChunkHeader = 4
	MaxChunk    = 1 << 20
)

// PutChunk writes the header of a chunk of n bytes, or of the end if n is 0,
// into the first ChunkHeader bytes of b.
func PutChunk(b []byte, n int) { binary.BigEndian.PutUint32(b, uint32(n)) }

// Chunk reads the header of a chunk. Zero means the end.
func Chunk(b [ChunkHeader]byte) (int, error) {
	n := binary.BigEndian.Uint32(b[:])
	if n > MaxChunk {
		return 0, fmt.Errorf("chunk of %d bytes: %w (limit %d)", n, ErrTooLarge, MaxChunk)
	}
	return int(n), nil
}
