// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// Unreachable describes the rules that never decide, because an earlier rule matches
// everything that they match. It is conservative: what it reports is certain, but
// rules that only several others cover together are not found.
func (s *Set) Unreachable() (list []string) {
	for i := range s.rules {
		for j := range s.rules[:i] {
			if s.rules[j].covers(&s.rules[i]) {
				list = append(list, fmt.Sprintf("%s never decides: %s matches everything that it matches", s.rules[i].ref, s.rules[j].ref))
				break
			}
		}
	}
	return list
}

// OneFamily describes the rules that deny one wildcard and leave the other open: what listens at
// both is reached over the other family.
func (s *Set) OneFamily() (list []string) {
	for i := range s.rules {
		r := &s.rules[i]
		four, six := r.Match.names(netip.IPv4Unspecified()), r.Match.names(netip.IPv6Unspecified())
		if !r.Deny || four == six {
			continue
		}
		denied, open := "0.0.0.0", "[::]"
		if six {
			denied, open = open, denied
		}
		other := *r
		other.Match.Addresses = []AddressMatch{{prefix: wildcardPrefix(!four)}}
		if !slices.ContainsFunc(s.rules, func(d rule) bool { return d.Deny && d.covers(&other) }) {
			list = append(list, fmt.Sprintf("%s denies %s alone: a server of both families stays open at %s", r.ref, denied, open))
		}
	}
	return list
}

// names reports whether the addresses of a rule have one.
func (m *Match) names(a netip.Addr) bool {
	return slices.ContainsFunc(m.Addresses, func(n AddressMatch) bool { return n.contains(a) })
}

func wildcardPrefix(is4 bool) netip.Prefix {
	if is4 {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 32)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 128)
}

// covers reports whether r decides about everything that o matches.
func (r *rule) covers(o *rule) bool {
	a, b := &r.Match, &o.Match
	if !r.Deny && len(a.Ports) == 0 { // does not decide about withheld ports
		return false
	}
	return (a.Protocol == 0 || a.Protocol == b.Protocol) &&
		coversAll(a.Ports, b.Ports, func(x, y PortRange) bool { return x.First <= y.First && y.Last <= x.Last }) &&
		coversAll(a.Addresses, b.Addresses, AddressMatch.covers) &&
		coversAll(a.Sources, b.sources(), same) && (a.Demand.IsZero() || a.Demand == b.Demand) && coversAll(a.Owners, b.Owners, same) &&
		(a.Name == "" || a.Name == b.Name) && (a.Namespace == "" || a.Namespace == b.Namespace) &&
		(a.Guest == "" || a.Guest == b.Guest) &&
		!slices.ContainsFunc(r.labels, func(l label) bool { return !slices.Contains(o.labels, l) })
}

// sources are those of which a rule can match a port.
func (m *Match) sources() []string {
	if len(m.Sources) == 0 && !m.Demand.IsZero() {
		return []string{port.SourceDemand}
	}
	return m.Sources
}

func same[T comparable](a, b T) bool { return a == b }

// coversAll reports whether each of b, which if empty is everything, is in one of a.
func coversAll[T any](a, b []T, covers func(a, b T) bool) bool {
	if len(a) == 0 {
		return true
	}
	missing := func(y T) bool { return !slices.ContainsFunc(a, func(x T) bool { return covers(x, y) }) }
	return len(b) > 0 && !slices.ContainsFunc(b, missing)
}

func (m AddressMatch) covers(o AddressMatch) bool {
	switch {
	case m == o:
		return true
	case m.wildcard:
		return o.prefix.IsSingleIP() && o.prefix.Addr().IsUnspecified()
	case o.wildcard || o.loopback:
		return false
	case m.loopback:
		return netip.MustParsePrefix("127.0.0.0/8").Overlaps(o.prefix) && o.prefix.Bits() >= 8 || o.prefix == netip.MustParsePrefix("::1/128")
	}
	return m.prefix.Bits() <= o.prefix.Bits() && m.prefix.Contains(o.prefix.Addr())
}
