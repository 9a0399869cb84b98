// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// proxySignature begins a header of the PROXY protocol, version 2: a text that no protocol
// whose server does not expect it takes for a request.
const proxySignature = "\r\n\r\n\x00\r\nQUIT\n"

const (
	proxyVersionCommand = 0x21 // version 2, command PROXY
	proxyUnspecified    = 0x00
	proxyTCP4           = 0x11 // AF_INET, STREAM
	proxyTCP6           = 0x21 // AF_INET6, STREAM

	proxyMax = 16 + 2*16 + 2*2 // bytes of the longest header that is written
)

// announce tells the server that was dialled who the client is, before any byte of it, if
// the rules say so.
func (s *Server) announce(conn net.Conn, req Request) error {
	if req.Publication.ProxyProtocol != port.ProxyProtocolV2 {
		return nil
	}
	client := req.Peer
	if req.Hidden {
		client = netip.AddrPort{}
	}
	_ = conn.SetWriteDeadline(time.Now().Add(s.opt.DialTimeout))
	if _, err := conn.Write(appendProxyHeader(make([]byte, 0, proxyMax), client, req.At)); err != nil {
		return fmt.Errorf("PROXY protocol header: %w", err)
	}
	return conn.SetWriteDeadline(time.Time{})
}

// appendProxyHeader appends a header of the PROXY protocol, version 2, for a TCP connection of
// a client to an address. A client that is not valid gives one without addresses (UNSPEC). Where
// the families differ, IPv4 is written as mapped into IPv6.
func appendProxyHeader(b []byte, client, at netip.AddrPort) []byte {
	b = append(append(b, proxySignature...), proxyVersionCommand)
	from, to := client.Addr().Unmap(), at.Addr().Unmap()
	if !from.IsValid() {
		return append(b, proxyUnspecified, 0, 0)
	}
	if from.Is4() && to.Is4() {
		b = append(b, proxyTCP4, 0, 2*4+2*2)
		b = append(append(b, from.AsSlice()...), to.AsSlice()...)
	} else {
		from, to := from.As16(), to.As16()
		b = append(b, proxyTCP6, 0, 2*16+2*2)
		b = append(append(b, from[:]...), to[:]...)
	}
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, client.Port()), at.Port())
}
