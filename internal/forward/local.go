// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"net"
	"net/netip"

	"github.com/fairlead/fairlead/internal/port"
)

// Carry is Serve for a connection that was accepted within the guest.
func (s *Server) Carry(ctx context.Context, conn net.Conn, pub port.Publication) error {
	req := Request{Publication: pub}
	if a, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		req.Peer = netip.AddrPortFrom(a.AddrPort().Addr().Unmap(), a.AddrPort().Port())
	}
	return s.Serve(ctx, conn, req)
}
