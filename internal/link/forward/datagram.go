// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"net"
	"net/netip"
	"sync"
	"syscall"
)

const (
	// FrameHead is the room in front of a datagram, in bytes, for what a link puts
	// there.
	FrameHead = ChunkHead + 2
	// MaxDatagram bounds the payload of one datagram, in bytes.
	MaxDatagram = 1<<16 - 1
)

// Datagrams is a UDP client's end of a flow: over a link, or within the process.
// One goroutine may receive while another sends.
type Datagrams interface {
	// Wait returns when a datagram can be received.
	Wait() error
	// Receive waits for a datagram and copies it to b, which has room for
	// MaxDatagram bytes. io.EOF is the client's end.
	Receive(b []byte) (n int, err error)
	// Send sends what follows the first FrameHead bytes of frame, which it may
	// overwrite.
	Send(frame []byte) error
	// Stop makes all other methods but Reset and Close return.
	Stop()
	// Reset aborts the flow, Close ends it.
	Reset() error
	Close() error
}

// Frame has room for any datagram, which follows FrameHead bytes.
type Frame [FrameHead + MaxDatagram]byte

var frames = sync.Pool{New: func() any { return new(Frame) }}

// BorrowFrame returns a frame, which Return gives back.
func BorrowFrame() *Frame { return frames.Get().(*Frame) }

// Return gives f back, which must not be used any more.
func (f *Frame) Return() { frames.Put(f) }

// Receiver reads the datagrams of a socket into frames that are borrowed only
// once there is one. One goroutine at a time may use it.
type Receiver struct {
	conn   net.Conn
	anyone bool            // conn is not connected
	raw    syscall.RawConn // nil where a read has to wait with its frame
	try    func(fd uintptr) bool
	told   []byte // room for the address of a datagram; empty if that is conn's own, or not told

	frame *Frame
	n     int
	from  Client
	err   error
}

// NewReceiver returns a receiver of conn: a UDP socket, or any connection that
// keeps datagrams apart.
func NewReceiver(conn net.Conn) *Receiver {
	r := &Receiver{conn: conn, raw: rawConn(conn)}
	if udp, ok := conn.(*net.UDPConn); ok && conn.RemoteAddr() == nil {
		r.anyone = true
		if wildcard(udp) {
			r.told = receiveAt(udp)
		}
	}
	r.try = r.receive
	return r
}

// Receive waits for a datagram of n bytes, which follows FrameHead bytes of
// frame. The caller gives frame back. From is set for sockets that are not
// connected.
func (r *Receiver) Receive() (frame *Frame, n int, from Client, err error) {
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
		r.n, r.from.Addr, r.err = r.conn.(*net.UDPConn).ReadFromUDPAddrPort(b)
		r.from.Addr = netip.AddrPortFrom(r.from.Addr.Addr().Unmap(), r.from.Addr.Port())
	} else {
		r.n, r.err = r.conn.Read(b)
	}
	if r.err != nil {
		r.frame.Return()
		r.frame = nil
	}
}
