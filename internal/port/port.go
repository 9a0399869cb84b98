// SPDX-License-Identifier: Apache-2.0

// Package port holds the values that flow through fairlead: what a source saw
// (Binding), what the merged table has (Publication), what of that a guest tells
// a host (Fact) and what became of it there (Outcome). It knows nothing of where
// they come from or go to.
package port

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
)

// Protocol is an IP protocol number (IANA "Protocol Numbers").
type Protocol uint8

// The protocols that can be published.
const (
	TCP Protocol = 6
	UDP Protocol = 17
)

// String returns "tcp", "udp" or "ip-N".
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	}
	return fmt.Sprintf("ip-%d", uint8(p))
}

// ParseProtocol accepts "tcp" and "udp" in any case.
func ParseProtocol(s string) (Protocol, error) {
	switch strings.ToLower(s) {
	case "tcp":
		return TCP, nil
	case "udp":
		return UDP, nil
	}
	return 0, fmt.Errorf("protocol %q: want tcp or udp", strings.Clone(s)) // s does not escape
}

// AppendText implements encoding.TextAppender.
func (p Protocol) AppendText(b []byte) ([]byte, error) { return append(b, p.String()...), nil }

// MarshalText implements encoding.TextMarshaler.
func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. Only tcp and udp are accepted.
func (p *Protocol) UnmarshalText(b []byte) error {
	v, err := ParseProtocol(string(b))
	if err != nil {
		return err
	}
	*p = v
	return nil
}

// Key identifies a publication: one protocol, one guest address, one port.
// Address is unmapped (never ::ffff:a.b.c.d) and may be a wildcard; a
// link-local address carries its interface as zone. There are many, so small fields are
// side by side.
type Key struct {
	Protocol Protocol   `json:"protocol"`
	Port     uint16     `json:"port"`
	Address  netip.Addr `json:"address"`
}

// Compare orders keys by port, protocol and address, as the table of `fairlead ls` shows them.
func (k Key) Compare(o Key) int {
	if c := cmp.Compare(k.Port, o.Port); c != 0 {
		return c
	}
	if c := cmp.Compare(k.Protocol, o.Protocol); c != 0 {
		return c
	}
	return k.Address.Compare(o.Address)
}

// String returns for example "tcp 0.0.0.0:8080" or "udp [::]:53".
func (k Key) String() string {
	return k.Protocol.String() + " " + k.AddrPort().String()
}

// AddrPort returns the guest address with the port.
func (k Key) AddrPort() netip.AddrPort { return netip.AddrPortFrom(k.Address, k.Port) }

// OtherFamily returns the key of the other family that a server of both has for this one: that
// of the other wildcard, or of the other address of "localhost". What one owner has at both is
// one port. Other addresses have none.
func (k Key) OtherFamily() (other Key, ok bool) {
	is4 := k.Address.Is4()
	switch {
	case k.Address.IsUnspecified() && is4:
		k.Address = netip.IPv6Unspecified()
	case k.Address.IsUnspecified():
		k.Address = netip.IPv4Unspecified()
	case k.Address != Loopback(k.Address):
		return k, false
	case is4:
		k.Address = netip.IPv6Loopback()
	default:
		k.Address = Loopback(netip.IPv4Unspecified())
	}
	return k, true
}

// Slot returns the protocol and port, which all guest addresses of one port share.
func (k Key) Slot() Slot { return Slot{k.Protocol, k.Port} }

// Slot is one port of one protocol on whatever address.
type Slot struct {
	Protocol Protocol
	Port     uint16
}

// String returns for example "8080/tcp".
func (s Slot) String() string { return fmt.Sprintf("%d/%s", s.Port, s.Protocol) }

// Bounds returns the first and the last key that a slot can have, in the order of
// Key.Compare.
func (s Slot) Bounds() (first, last Key) {
	return Key{Protocol: s.Protocol, Port: s.Port}, // the zero Addr sorts first
		Key{Protocol: s.Protocol, Port: s.Port, Address: lastAddr}
}

// lastAddr sorts behind every address that a socket can have: a zone sorts last.
var lastAddr = netip.MustParseAddr("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff%\U0010ffff")

// IsWildcard reports whether a is 0.0.0.0 or ::.
func IsWildcard(a netip.Addr) bool { return a.IsUnspecified() }

// Loopback returns 127.0.0.1 or ::1, of the family of a.
func Loopback(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}
