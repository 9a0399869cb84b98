// SPDX-License-Identifier: Apache-2.0

// Package rules decides which publications may appear on the host, and at which
// host addresses. The first rule that matches wins. Guest agent and host peer
// use the same engine: the agent from what the guest publishes, the host from
// what the agent asks for.
package rules

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config/words"
	"github.com/fairlead/fairlead/internal/port"
)

// Rule is one rule. Its zero value allows everything that nothing withholds.
type Rule struct {
	// Kind is the kind of the request that makes the rule; NoRule of one of the configuration.
	Kind  port.RuleKind
	Name  string `key:"name" is:"text" help:"how messages name the rule, beside its number"` // may be empty
	Match Match  `key:"match" help:"the ports that are meant: all keys must match, and one of the values of each; without it, all ports"`
	Deny  bool   `key:"action" words:"allow,deny" need:"no action: want action: allow or action: deny" help:"what becomes of a port that matches"`

	// The rest is only where it allows.
	HostPort    HostPort    `key:"hostPort" types:"integer,string" pattern:"^[+-]?[0-9]+$" help:"a port, an offset from the port that is asked for such as \"+1000\", or 0 for any free port"`
	HostAddress HostAddress `key:"hostAddress" types:"string" pattern:"." help:"loopback, all or an address of the host"`
	// OnConflict is only on a host.
	OnConflict port.OnConflict `key:"onConflict" is:"onConflict" enum:"wait,next,any" help:"on a host, where the port is in use: wait until it is free, open the next free port, or any"`
	// ProxyProtocol is only of TCP, and on an agent.
	ProxyProtocol port.ProxyProtocol `key:"proxyProtocol" is:"proxyProtocol" enum:"v2" help:"on an agent, of TCP: tell the server the client's address by the PROXY protocol"`

	// Until is the end of a rule that exposes: until then it opens, at HostAddress too, what the
	// other rules allow. Only run-time rules of a host do. Zero for all other rules.
	Until time.Time
}

// Exposes reports whether the rule opens ports wider for a time, and decides nothing else.
func (r Rule) Exposes() bool { return !r.Until.IsZero() }

// MaxExposure is the longest time for which a rule exposes.
const MaxExposure = 7 * 24 * time.Hour

// Match selects the publications that a rule is about. A field that is empty matches
// all; a field with several values matches any of them.
type Match struct {
	Protocol  port.Protocol    `key:"protocol" enum:"tcp,udp,TCP,UDP" help:"of the port"` // 0 is any
	Ports     PortRanges       `key:"ports" types:"integer,string" pattern:"^[0-9]+(-[0-9]+)?( *, *[0-9]+(-[0-9]+)?)*$" min:"1" max:"65535" some:"want at least one, or leave the key out to match all" help:"ports of the guest, and ranges of them"`
	Addresses []AddressMatch   `key:"address" types:"string" pattern:"." some:"want at least one, or leave the key out to match all" help:"the guest's address: wildcard, loopback, an address or a CIDR prefix"`
	Sources   []string         `key:"source" words:"socket,nat,docker,podman,containerd,kube,publish,demand" some:"want at least one, or leave the key out to match all" help:"who reported the port; kube is the Services of all clusters"` // of any origin; see port.Family
	Owners    []port.OwnerKind `key:"owner" words:"container,service,process,unknown" some:"want at least one, or leave the key out to match all" help:"what has the port"`

	Name      string            `key:"name" is:"text" help:"the owner's name; * is any text, ? one character"`
	Namespace string            `key:"namespace" is:"text" help:"the owner's namespace; * is any text, ? one character"`
	Labels    map[string]string `key:"labels" help:"labels that the owner has, each with a value; * is any text, ? one character"` // all of these
	Guest     string            `key:"guest" is:"text" help:"on a host: the guest's name there, else its endpoint; * is any text, ? one character"`

	// Demand is what a port was asked for by. A rule that allows such a port asks for it. Only
	// run-time rules have it; the protocol and the port are those of the rule.
	Demand port.Demand
}

// Sources returns the names that Match.Sources can hold.
func Sources() []string {
	return []string{port.SourceSocket, port.SourceNAT, "docker", "podman", "containerd", "kube", port.SourcePublish, port.SourceDemand}
}

// PortRange is First to Last, both included.
type PortRange struct{ First, Last uint16 }

// PortRanges is a list of ranges, of which one text may have several.
type PortRanges []PortRange

// AppendFrom adds what ParsePorts reads.
func (r *PortRanges) AppendFrom(text string) error {
	ranges, err := ParsePorts(text)
	*r = append(*r, ranges...)
	return err
}

// ParsePorts reads "8080", "8000-8999" or several of these with commas between.
// Ports are 1 to 65535.
func ParsePorts(s string) ([]PortRange, error) {
	var ranges []PortRange
	for part := range strings.SplitSeq(s, ",") {
		first, last, isRange := strings.Cut(strings.TrimSpace(part), "-")
		lo, ok := parsePort(first)
		hi, ok2 := lo, true
		if isRange {
			hi, ok2 = parsePort(last)
		}
		if !ok || !ok2 || lo == 0 || hi == 0 {
			return nil, fmt.Errorf("%q: want a port (8080) or a range (8000-8999), from 1 to 65535", s)
		}
		if hi < lo {
			return nil, fmt.Errorf("%q: the range ends before it begins", s)
		}
		ranges = append(ranges, PortRange{lo, hi})
	}
	return ranges, nil
}

func parsePort(s string) (uint16, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil && s[0] != '+'
}

// String returns "8080" or "8000-8999".
func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// AddressMatch matches guest addresses. What listens at both wildcards is two publications,
// and 0.0.0.0 matches one of them.
type AddressMatch struct {
	wildcard, loopback bool
	prefix             netip.Prefix
}

// ParseAddressMatch reads "wildcard" (0.0.0.0 and ::), "loopback" (127.0.0.0/8
// and ::1), an address or a CIDR prefix.
func ParseAddressMatch(s string) (AddressMatch, error) {
	switch s {
	case "wildcard":
		return AddressMatch{wildcard: true}, nil
	case "loopback":
		return AddressMatch{loopback: true}, nil
	}
	if p, err := netip.ParsePrefix(s); err == nil {
		if p.Addr().Is4In6() {
			return AddressMatch{}, fmt.Errorf("%q: write an IPv4 prefix as such", s)
		}
		if p != p.Masked() {
			return AddressMatch{}, fmt.Errorf("%q has bits outside its prefix: want %s", s, p.Masked())
		}
		return AddressMatch{prefix: p}, nil
	}
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return AddressMatch{prefix: netip.PrefixFrom(a, a.BitLen())}, nil
	}
	return AddressMatch{}, fmt.Errorf("%q: want an address, a CIDR prefix, wildcard or loopback%s",
		s, words.Suggest(s, []string{"wildcard", "loopback"}))
}

// String returns what ParseAddressMatch reads.
func (m AddressMatch) String() string {
	switch {
	case m.wildcard:
		return "wildcard"
	case m.loopback:
		return "loopback"
	case m.prefix.IsSingleIP():
		return m.prefix.Addr().String()
	}
	return m.prefix.String()
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *AddressMatch) UnmarshalText(b []byte) (err error) {
	*m, err = ParseAddressMatch(string(b))
	return err
}

func (m AddressMatch) contains(a netip.Addr) bool {
	switch {
	case m.wildcard:
		return port.IsWildcard(a)
	case m.loopback:
		return a.IsLoopback()
	}
	return m.prefix.Contains(a.WithZone(""))
}

// HostPort is the host port that an allowed publication gets. The zero value is
// the port that is asked for: the guest's own.
type HostPort struct {
	kind   hostPortKind
	offset int
	port   uint16
}

type hostPortKind uint8

const (
	samePort hostPortKind = iota
	fixedPort
	offsetPort
)

// FixedPort is one port of the host, not 0.
func FixedPort(n uint16) HostPort { return HostPort{kind: fixedPort, port: n} }

// ParseHostPort reads a port ("9090"), an offset from the port that is asked for
// ("+1000", "-1000") or "0", any free port.
func ParseHostPort(s string) (HostPort, error) {
	if strings.HasPrefix(s, "+") || strings.HasPrefix(s, "-") {
		n, err := strconv.Atoi(s)
		if err == nil && n > -65535 && n < 65535 {
			return HostPort{kind: offsetPort, offset: n}, nil
		}
	} else if n, ok := parsePort(s); ok {
		return HostPort{kind: fixedPort, port: n}, nil
	}
	return HostPort{}, fmt.Errorf(`%q: want a port up to 65535, an offset such as "+1000", or 0 for any free port`, s)
}

// String returns what ParseHostPort reads, and "same" for the zero value.
func (h HostPort) String() string {
	switch h.kind {
	case fixedPort:
		return strconv.Itoa(int(h.port))
	case offsetPort:
		return fmt.Sprintf("%+d", h.offset)
	}
	return "same"
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *HostPort) UnmarshalText(b []byte) (err error) {
	*h, err = ParseHostPort(string(b))
	return err
}

// of returns the host port for the port asked, and whether there is one.
func (h HostPort) of(asked uint16) (uint16, bool) {
	switch h.kind {
	case fixedPort:
		return h.port, true
	case offsetPort:
		if asked == 0 { // any free one stays any free one
			return 0, true
		}
		n := int(asked) + h.offset
		return uint16(n), n >= 1 && n <= 65535
	}
	return asked, true
}

// HostAddress is the host addresses on which something appears. The zero value is
// what is asked for, which on the agent is the host's loopback.
type HostAddress struct {
	kind hostAddressKind
	addr netip.Addr
}

type hostAddressKind uint8

const (
	askedAddress hostAddressKind = iota
	loopbackAddress
	allAddresses
	oneAddress
)

// Asked is the addresses that are asked for, the zero value.
func Asked() HostAddress { return HostAddress{} }

// Loopback is the host's loopback, 127.0.0.1 or ::1 by family.
func Loopback() HostAddress { return HostAddress{kind: loopbackAddress} }

// All is all addresses of the host, 0.0.0.0 or :: by family.
func All() HostAddress { return HostAddress{kind: allAddresses} }

// ParseHostAddress reads "loopback", "all" or an address.
func ParseHostAddress(s string) (HostAddress, error) {
	switch s {
	case "loopback":
		return Loopback(), nil
	case "all":
		return All(), nil
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return HostAddress{kind: oneAddress, addr: a.Unmap()}, nil
	}
	return HostAddress{}, fmt.Errorf("%q: want loopback, all or an address of the host%s",
		s, words.Suggest(s, []string{"loopback", "all"}))
}

// String returns what ParseHostAddress reads, and "asked" for the zero value.
func (h HostAddress) String() string {
	switch h.kind {
	case loopbackAddress:
		return "loopback"
	case allAddresses:
		return "all"
	case oneAddress:
		return h.addr.String()
	}
	return "asked"
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *HostAddress) UnmarshalText(b []byte) (err error) {
	*h, err = ParseHostAddress(string(b))
	return err
}

// of returns the host address for the address asked.
func (h HostAddress) of(asked netip.Addr) netip.Addr {
	switch h.kind {
	case loopbackAddress:
		if asked.IsLoopback() {
			return asked
		}
		return port.Loopback(asked)
	case allAddresses:
		if asked.Is4() {
			return netip.IPv4Unspecified()
		}
		return netip.IPv6Unspecified()
	case oneAddress:
		return h.addr
	}
	return asked
}

// limit returns the host address for the address asked, never a wider one. Beside h
// only the loopback is allowed: an address that h does not cover becomes the loopback's.
func (h HostAddress) limit(asked netip.Addr) netip.Addr {
	switch {
	case asked.IsLoopback() || h.kind == askedAddress || h.kind == allAddresses || h.addr == asked:
		return asked
	case h.kind == oneAddress && h.addr.Is4() == asked.Is4() && asked.IsUnspecified():
		return h.addr
	case h.kind == oneAddress && h.addr.Is4() == asked.Is4() && h.addr.IsUnspecified():
		return asked
	}
	return port.Loopback(asked)
}

// Check returns what no single field shows to be wrong, by the key of the field.
func (r Rule) Check() (key string, err error) {
	if r.Deny && r.HostPort != (HostPort{}) {
		return "hostPort", fmt.Errorf("%s: only a rule with action allow has a host port", r.HostPort)
	}
	if r.Deny && r.HostAddress != Asked() {
		return "hostAddress", fmt.Errorf("%s: only a rule with action allow has a host address", r.HostAddress)
	}
	if r.Deny && r.OnConflict != port.OnConflictUnset {
		return "onConflict", fmt.Errorf("%s: only a rule with action allow opens a port", r.OnConflict)
	}
	if r.ProxyProtocol != port.ProxyProtocolNone {
		switch {
		case r.Deny:
			return "proxyProtocol", fmt.Errorf("%s: only a rule with action allow connects to a server", r.ProxyProtocol)
		case r.Match.Protocol != port.TCP:
			return "proxyProtocol", fmt.Errorf("%s: it is spoken over TCP alone: want protocol: tcp in match", r.ProxyProtocol)
		}
	}
	several := len(r.Match.Ports) > 1
	for _, p := range r.Match.Ports {
		several = several || p.First != p.Last
		for _, n := range []uint16{p.First, p.Last} {
			if _, ok := r.HostPort.of(n); !ok {
				return "hostPort", fmt.Errorf("%q: port %d would become %d, want 1 to 65535",
					r.HostPort, n, int(n)+r.HostPort.offset)
			}
		}
	}
	if several && r.HostPort.kind == fixedPort && r.HostPort.port != 0 {
		return "hostPort", fmt.Errorf(`%q: several guest ports cannot share one host port, want an offset such as "+1000"`, r.HostPort)
	}
	for _, s := range r.Match.Sources {
		if err := words.Check(s, Sources()...); err != nil {
			return "match.source", err
		}
	}
	return "", nil
}

// CheckSide returns why a list has a rule that only the other side may have: the agent's
// where these are a host's, and the host's where these are an agent's.
func CheckSide(host bool, list []Rule) error {
	for i, r := range list {
		var err error
		switch {
		case host && r.ProxyProtocol != port.ProxyProtocolNone:
			err = fmt.Errorf("proxyProtocol %s: only an agent connects to servers: want it in a rule there", r.ProxyProtocol)
		case host:
		case r.Match.Guest != "":
			err = fmt.Errorf("guest %q: only rules of a host name guests", r.Match.Guest)
		case r.OnConflict != port.OnConflictUnset:
			err = fmt.Errorf("onConflict %s: only a host opens another port: want it in a rule there", r.OnConflict)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", port.RuleRef{Kind: port.RuleConfigured, Number: uint32(i + 1), Name: r.Name}, err)
		}
	}
	return nil
}

// Glob reports whether s matches the pattern of a rule, in which * stands for any text.
func Glob(pattern, s string) bool { return glob(pattern, s) }

// glob reports whether s matches the pattern, in which * stands for any text
// (none too, and / as well) and ? for one byte. It takes time of the order of
// the product of the lengths, whatever the pattern.
func glob(pattern, s string) bool {
	p, i, star, mark := 0, 0, -1, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, i
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == s[i]):
			p++
			i++
		case star >= 0:
			mark++
			p, i = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}
