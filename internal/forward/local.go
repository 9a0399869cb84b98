// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/wire"
)

// Carry takes a connection that came in within the guest to what serves pub, and
// carries it until both directions ended; the end of ctx resets it. It owns conn,
// which is reset if nothing serves pub. The error says why the flow did not end
// in order; it has been logged.
func (s *Server) Carry(ctx context.Context, conn net.Conn, pub port.Publication) error {
	s.stats.tcp.Add(1)
	defer s.stats.tcp.Add(-1)
	var peer netip.AddrPort
	if a, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		peer = netip.AddrPortFrom(a.AddrPort().Addr().Unmap(), a.AddrPort().Port())
	}
	req := wire.FlowRequest{Key: pub.Key, Peer: peer}
	to, _, status, err := s.dial(ctx, "tcp", s.targets(pub, peer), req)
	switch {
	case err == nil:
		s.stats.ok.Add(1)
		err = Splice(ctx, conn, to, &s.meter)
	case status == wire.FlowUnreachable:
		s.stats.unreachable.Add(1)
		Reset(conn)
		err = fmt.Errorf("%s: %w", status, err)
	default:
		s.stats.refused.Add(1)
		Reset(conn)
		err = fmt.Errorf("%s: %w", status, err)
	}
	if err != nil {
		s.opt.Logger.Debug("flow ended", "publication", pub.Key, "peer", peer, "error", err)
	}
	return err
}
