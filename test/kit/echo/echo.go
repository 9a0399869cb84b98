// SPDX-License-Identifier: Apache-2.0

// Package echo returns to clients what they send.
package echo

import (
	"io"
	"net"
)

// Serve returns to each connection what it sends, until the listener is closed.
func Serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = c.Close() }()
			_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) // without splice(2), whose pipes many flows would use up
		}()
	}
}

// ServePackets returns each datagram, until the socket is closed.
func ServePackets(c net.PacketConn) {
	for b := make([]byte, 1<<16); ; {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		_, _ = c.WriteTo(b[:n], from)
	}
}
