// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// A server that was reached may be reset after its end; that reaches who waits for it.
func TestReachedAwaitsAReset(t *testing.T) {
	t.Run("connections", func(t *testing.T) {
		ln, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		k := key(port.TCP, any4, ports.Free(t))
		a := newAgent(t, "vm")
		a.serve(k, ln.Addr().(*net.TCPAddr).AddrPort())
		a.begins(snapshot(1, ownedBy(k, web)))
		h, _ := start(t, Options{}, a)
		a.wants(k, port.Active)
		conn, err := h.Dial(t.Context(), t.Context(), reachOf(k))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		server := c.(*net.TCPConn)
		_ = server.CloseWrite()
		if b, err := io.ReadAll(conn); err != nil || len(b) > 0 {
			t.Fatalf("%q, %v", b, err)
		}
		_ = server.SetLinger(0)
		_ = server.Close()
		if err := forward.AwaitReset(conn); !errors.Is(err, link.ErrReset) {
			t.Errorf("%v, want a reset", err)
		}
	})
}
