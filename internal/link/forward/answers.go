// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"net"
	"net/netip"
)

// Client is the far end of a UDP flow at a socket that serves several.
type Client struct {
	Addr netip.AddrPort // unmapped
	// At is the address that the client sends to, from which it expects the answers. It is
	// the zero Addr if that is the socket's own, or not known.
	At netip.Addr
}

// Answers sends datagrams to one client of a socket.
type Answers struct {
	conn    *net.UDPConn
	to      netip.AddrPort
	control []byte // nil if the kernel chooses the source
}

// NewAnswers returns the answers to a client that a Receiver of conn met.
func NewAnswers(conn *net.UDPConn, to Client) Answers {
	return Answers{conn: conn, to: named(to.Addr), control: sourceControl(to.At)}
}

// Send sends a datagram, from the address that the client sends to.
func (a *Answers) Send(b []byte) error {
	if a.control == nil {
		_, err := a.conn.WriteToUDPAddrPort(b, a.to)
		return err
	}
	_, _, err := a.conn.WriteMsgUDPAddrPort(b, a.control, a.to)
	return err
}

// wildcard reports whether conn receives what is sent to any address.
func wildcard(conn *net.UDPConn) bool {
	a, ok := conn.LocalAddr().(*net.UDPAddr)
	return ok && (a.IP == nil || a.IP.IsUnspecified())
}
