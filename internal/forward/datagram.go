// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"encoding/binary"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/wire"
)

// FrameHead is the room in front of a datagram, for the headers of the frame and
// of the chunk that holds it.
const FrameHead = wire.ChunkHeader + wire.DatagramHeader

// Frame is room for any datagram, which stands behind FrameHead.
type Frame [FrameHead + wire.MaxDatagram]byte

var frames = sync.Pool{New: func() any { return new(Frame) }}

// BorrowFrame returns a frame, which Return gives back.
func BorrowFrame() *Frame { return frames.Get().(*Frame) }

// Return gives f back: nobody uses it any more.
func (f *Frame) Return() { frames.Put(f) }

// WriteFrame sends the datagram that stands in frame behind FrameHead bytes, which
// it fills.
func WriteFrame(s link.Stream, frame []byte) error {
	if v, ok := s.(chunked); ok {
		putDatagram(frame)
		return v.WriteChunk(frame)
	}
	return wire.WriteDatagram(s, frame[wire.ChunkHeader:])
}

func putDatagram(frame []byte) {
	binary.BigEndian.PutUint16(frame[wire.ChunkHeader:], uint16(len(frame)-FrameHead))
}

// prompt is a link's stream that can be written to without waiting.
type prompt interface {
	chunked
	// TryChunk is WriteChunk of as much as is taken at once, maybe nothing. What is
	// left of a chunk that was begun must be written to Raw, and then told by Wrote.
	TryChunk(frame []byte) (n int)
}

// TryFrame is WriteFrame if s takes the datagram without a wait. It returns what is
// left to send: nothing, all of frame, or, if begun, bytes for FinishFrame.
func TryFrame(s link.Stream, frame []byte) (rest []byte, begun bool) {
	v, ok := s.(prompt)
	if !ok {
		return frame, false
	}
	putDatagram(frame)
	n := v.TryChunk(frame)
	return frame[n:], n > 0 && n < len(frame)
}

// FinishFrame writes what TryFrame left of a frame that it began.
func FinishFrame(s link.Stream, rest []byte) error {
	v := s.(chunked)
	n, err := v.Raw().Write(rest)
	return v.Wrote(n, err)
}

// Receiver reads the datagrams of a socket into frames that are borrowed only
// once there is one. One goroutine at a time may use it.
type Receiver struct {
	conn   net.Conn
	anyone bool            // conn is not connected
	raw    syscall.RawConn // nil where a read has to wait with its frame
	try    func(fd uintptr) bool

	frame *Frame
	n     int
	from  netip.AddrPort
	err   error
}

// NewReceiver returns a receiver of conn: a UDP socket, or any connection that
// keeps datagrams apart.
func NewReceiver(conn net.Conn) *Receiver {
	r := &Receiver{conn: conn, raw: rawConn(conn)}
	if _, ok := conn.(*net.UDPConn); ok {
		r.anyone = conn.RemoteAddr() == nil
	}
	r.try = r.receive
	return r
}

// Receive waits for a datagram of n bytes, which stands in frame behind
// FrameHead. The caller gives frame back. From is set for sockets that are not
// connected.
func (r *Receiver) Receive() (frame *Frame, n int, from netip.AddrPort, err error) {
	if r.raw == nil {
		r.wait()
	} else if err := r.raw.Read(r.try); err != nil {
		return nil, 0, from, err
	}
	frame, n, from, err = r.frame, r.n, r.from, r.err
	r.frame = nil
	return frame, n, from, err
}

// wait receives with a frame in hand.
func (r *Receiver) wait() {
	r.frame = BorrowFrame()
	b := r.frame[FrameHead:]
	if r.anyone {
		r.n, r.from, r.err = r.conn.(*net.UDPConn).ReadFromUDPAddrPort(b)
	} else {
		r.n, r.err = r.conn.Read(b)
	}
	if r.err != nil {
		r.frame.Return()
		r.frame = nil
	}
}
