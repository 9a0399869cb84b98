// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"net"
	"net/netip"

	"github.com/fairlead/fairlead/internal/port"
)

// Carry is Serve for a connection that was accepted within the guest. Behind one from the
// loopback may be a relay, so its client counts as hidden.
func (s *Server) Carry(ctx context.Context, conn net.Conn, pub port.Publication) error {
	req := accepted(conn, pub)
	req.Hidden = req.Peer.Addr().IsLoopback()
	return s.Serve(ctx, conn, req)
}

// CarryHidden is Carry for connections of a forwarder, which hides its clients.
func (s *Server) CarryHidden(ctx context.Context, conn net.Conn, pub port.Publication) error {
	req := accepted(conn, pub)
	req.Hidden = true
	return s.Serve(ctx, conn, req)
}

func accepted(conn net.Conn, pub port.Publication) Request {
	return Request{Publication: pub, Peer: tcpAddr(conn.RemoteAddr()), At: tcpAddr(conn.LocalAddr())}
}

// tcpAddr returns an address, unmapped; the zero AddrPort if it is none of TCP.
func tcpAddr(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := t.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
