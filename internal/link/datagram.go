// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bufio"
	"encoding/binary"
	"net"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
)

// DatagramHead is the room in front of a datagram, in bytes, for the headers of
// its frame and of the chunk that holds it.
const DatagramHead = wire.ChunkHeader + wire.DatagramHeader

// Datagrams sends and receives datagrams over the stream of a UDP flow. One
// goroutine may receive while another sends.
type Datagrams struct {
	stream Stream
	chunks chunkWriter // stream, nil if it has no connection of its own
	in     *bufio.Reader
}

// chunkWriter is what a flow with a connection of its own can do besides Stream.
type chunkWriter interface {
	Raw() net.Conn
	WriteChunk(frame []byte) error
	TryChunk(frame []byte) int
	Wrote(n int, err error) error
}

// datagramBuffer takes the header and most payloads at once. What is larger goes
// past it.
const datagramBuffer = 4 << 10

// NewDatagrams returns the datagrams of a stream, which it owns from now on.
func NewDatagrams(s Stream) *Datagrams {
	c, _ := s.(chunkWriter)
	return &Datagrams{stream: s, chunks: c, in: bufio.NewReaderSize(s, datagramBuffer)}
}

// Wait returns when a datagram can be received, or with the error of the stream:
// io.EOF at its end.
func (d *Datagrams) Wait() error {
	_, err := d.in.Peek(1)
	return err
}

// Receive waits for a datagram and reads it into b, which has room for
// wire.MaxDatagram bytes.
func (d *Datagrams) Receive(b []byte) (int, error) { return wire.ReadDatagram(d.in, b) }

// Send sends what follows the first DatagramHead bytes of frame, which it
// overwrites.
func (d *Datagrams) Send(frame []byte) error {
	if d.chunks == nil {
		return wire.WriteDatagram(d.stream, frame[wire.ChunkHeader:])
	}
	putDatagram(frame)
	return d.chunks.WriteChunk(frame)
}

// TrySend is Send if the stream takes the datagram without waiting. It returns
// what is left to send: nothing, all of frame, or, if begun, bytes for Finish.
func (d *Datagrams) TrySend(frame []byte) (left []byte, begun bool) {
	if d.chunks == nil {
		return frame, false
	}
	putDatagram(frame)
	n := d.chunks.TryChunk(frame)
	return frame[n:], n > 0 && n < len(frame)
}

// Finish sends what TrySend left of a frame that it began.
func (d *Datagrams) Finish(left []byte) error {
	n, err := d.chunks.Raw().Write(left)
	return d.chunks.Wrote(n, err)
}

// Stop makes all methods but Reset and Close return.
func (d *Datagrams) Stop() { _ = d.stream.SetDeadline(time.Unix(1, 0)) }

// Reset resets the stream.
func (d *Datagrams) Reset() error { return d.stream.Reset() }

// Close closes the stream.
func (d *Datagrams) Close() error { return d.stream.Close() }

func putDatagram(frame []byte) {
	binary.BigEndian.PutUint16(frame[wire.ChunkHeader:], uint16(len(frame)-DatagramHead))
}
