// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"
)

// echoThrough opens a TCP connection through the host to an echo server.
func echoThrough(t testing.TB, r *rig, addr string) net.Conn {
	t.Helper()
	var c net.Conn
	r.eventually("a connection through the host", func() (err error) {
		if c, err = r.outside.Dial("tcp", addr); err != nil {
			return err
		}
		if err = roundTrip(c, "hello"); err != nil {
			_ = c.Close()
		}
		return err
	})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// roundTrip sends text and expects it back. A datagram may be lost, so the limit for
// one is short and callers retry.
func roundTrip(c net.Conn, text string) error {
	limit := time.Minute
	if c.LocalAddr().Network() == "udp" {
		limit = 5 * time.Second
	}
	_ = c.SetDeadline(time.Now().Add(limit))
	if _, err := io.WriteString(c, text); err != nil {
		return err
	}
	b := make([]byte, len(text))
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if string(b) != text {
		return fmt.Errorf("echo of %q is %q", text, b)
	}
	return nil
}
