// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
	"io"
)

// DatagramHeader is the number of bytes in front of each datagram: its length,
// big-endian. A UDP flow's stream is a sequence of such frames in each direction.
const DatagramHeader = 2

// ReadDatagram reads one datagram into buf and returns its length, which may be
// 0. A buf of MaxDatagram bytes takes any; one that is too short gives
// io.ErrShortBuffer and the stream is then out of step. io.EOF means that the
// stream ended between datagrams. It reads twice: give it a bufio.Reader.
func ReadDatagram(r io.Reader, buf []byte) (int, error) {
	var h [DatagramHeader]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return 0, err
	}
	n := int(binary.BigEndian.Uint16(h[:]))
	if n > len(buf) {
		return 0, fmt.Errorf("datagram of %d bytes: %w (%d)", n, io.ErrShortBuffer, len(buf))
	}
	if _, err := io.ReadFull(r, buf[:n]); err != nil {
		return 0, midFrame(err)
	}
	return n, nil
}

// WriteDatagram writes one datagram in a single Write. The payload is in
// frame[DatagramHeader:]; the bytes before it are set to the length, so that
// nothing is copied:
//
//	n, err := udp.Read(buf[wire.DatagramHeader:])
//	err = wire.WriteDatagram(stream, buf[:wire.DatagramHeader+n])
func WriteDatagram(w io.Writer, frame []byte) error {
	n := len(frame) - DatagramHeader
	if n < 0 || n > MaxDatagram {
		return fmt.Errorf("datagram of %d bytes: %w (limit %d)", n, ErrTooLarge, MaxDatagram)
	}
	binary.BigEndian.PutUint16(frame, uint16(n))
	_, err := w.Write(frame)
	return err
}
