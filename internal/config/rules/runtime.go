// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// WithRuntime returns s with the rules of requests that were made while fairlead runs, in place of
// those that it has. They are evaluated after the rules of the configuration, for what these do
// not deny. They lift the defaults' denials if they name the port, but no rule's, and open
// no address that the configuration would not: what they ask for beyond it is opened on
// the loopback. An error names the rule and the field.
func (s *Set) WithRuntime(list []Rule) (*Set, error) {
	compiled, err := compile(list)
	if err != nil {
		return nil, err
	}
	t := *s
	t.runtime = compiled
	return &t, nil
}

// Demands returns what the run-time rules ask for, without repetition in their order. What a rule before it closes is asked for all the same, and denied.
func (s *Set) Demands() (list []port.Demand) {
	for i := range s.runtime {
		r := &s.runtime[i]
		d := r.Match.Demand
		if !d.IsZero() && !r.Deny && !slices.Contains(list, d) {
			list = append(list, d)
		}
	}
	return list
}

// side is where rules decide: on the agent, or on the host about a guest.
type side struct {
	host  bool
	guest string
}

// name is what decisions there call a rule.
func (v side) name(r *rule) port.RuleRef { return r.ref.Here(v.host) }

// overlay applies the run-time rules to what the configuration decides by winner, nil if
// no rule of it did. Within is where p appears unless a run-time rule narrows it. A winner that
// denies is final. One that allows but has no host port for p gives way to a run-time rule that
// has one.
func (s *Set) overlay(v side, p *port.Publication, d port.Ruling, winner *rule, within []netip.AddrPort) (port.Ruling, *rule) {
	if winner != nil && winner.Deny {
		return d, winner
	}
	r, maybe := first(s.runtime, v.guest, p, !d.Allow)
	result, decided := d, winner
	onConflict, proxyProtocol := d.OnConflict, d.ProxyProtocol
	if !d.Allow && winner != nil { // without a host port
		if r != nil && !r.Deny && r.HostPort == (HostPort{}) {
			r = nil
		}
		within = winner.HostAddress.ofAll(within)
		onConflict, proxyProtocol = winner.OnConflict, winner.ProxyProtocol
	}
	if r != nil {
		result, decided = r.narrow(v.name(r), within), r
		if result.Allow {
			result.OnConflict = cmp.Or(r.OnConflict, onConflict)
			result.ProxyProtocol = proxyProtocol
		}
	}
	for _, r := range maybe {
		if m := r.narrow(v.name(r), within); m.Allow != result.Allow || !slices.Equal(m.Host, result.Host) {
			return r.undecided(v.name(r), p), r
		}
	}
	if v.host && result.Allow {
		s.widen(v.guest, p, &result, winner)
	}
	return result, decided
}

// widen opens p at more addresses, which come first, and keeps the others, where run-time
// rules expose it, until the last of them ends. The others remain where the wider ones cannot
// be opened. Beyond what the configuration has for all ports it goes nowhere, nor where a rule
// of the configuration, winner, names the address.
func (s *Set) widen(guest string, p *port.Publication, d *port.Ruling, winner *rule) {
	if winner != nil && winner.HostAddress != Asked() {
		return
	}
	var wide []netip.AddrPort
	for i := range s.runtime {
		r := &s.runtime[i]
		if !r.Exposes() || r.Match.Guest != "" && !glob(r.Match.Guest, guest) || r.mismatch(p) != fieldNone {
			continue
		}
		for _, a := range d.Host {
			if at := s.expose.limit(r.HostAddress.of(a.Addr())); !covered(at, d.Host) {
				wide = append(wide, netip.AddrPortFrom(at, a.Port()))
				if d.Exposed == nil || r.Until.After(*d.Exposed) {
					d.Exposed = &r.Until
				}
			}
		}
	}
	var at []netip.AddrPort
	for _, a := range wide {
		if all := netip.AddrPortFrom(All().of(a.Addr()), a.Port()); a == all || !slices.Contains(wide, all) {
			at = append(at, a)
		}
	}
	if len(at) > 0 {
		d.Host = unique(append(at, d.Host...))
	}
}

// narrow is decide, without addresses beyond those within which r may decide.
func (r *rule) narrow(ref port.RuleRef, within []netip.AddrPort) port.Ruling {
	d := r.decide(ref, slices.Clone(within))
	for i, a := range d.Host {
		if !covered(a.Addr(), within) {
			d.Host[i] = netip.AddrPortFrom(port.Loopback(a.Addr()), a.Port())
		}
	}
	d.Host = unique(d.Host)
	return d
}

// ofAll returns where ports appear that are asked for at a list of addresses.
func (h HostAddress) ofAll(list []netip.AddrPort) []netip.AddrPort {
	at := make([]netip.AddrPort, len(list))
	for i, a := range list {
		at[i] = netip.AddrPortFrom(h.of(a.Addr()), a.Port())
	}
	return at
}

// covered reports whether a listener at a is reachable from nowhere else than those of a
// list of addresses, or this machine.
func covered(a netip.Addr, list []netip.AddrPort) bool {
	return a.IsLoopback() || slices.ContainsFunc(list, func(b netip.AddrPort) bool {
		return b.Addr() == a || b.Addr().IsUnspecified() && b.Addr().Is4() == a.Is4()
	})
}

// OpenAt reports whether what is open at a list of addresses is as wide as h asks for. It is if
// nothing is open.
func (h HostAddress) OpenAt(list []netip.AddrPort) bool {
	return len(list) == 0 || slices.ContainsFunc(list, func(a netip.AddrPort) bool { return covered(h.of(a.Addr()), list) })
}

// MayAllow returns why a run-time rule that allows ports of a guest at a host address would
// never have an effect: a rule of the configuration denies the ports whatever serves them,
// or nothing in it opens such an address.
func (s *Set) MayAllow(m Match, at HostAddress) error {
	if err := s.mayAllow(m); err != nil {
		return err
	}
	wider := s.expose != Loopback() || slices.ContainsFunc(s.rules, func(r rule) bool { return r.HostAddress != Asked() && r.HostAddress != Loopback() })
	if !wider && at != Asked() && at != Loopback() && (at.kind != oneAddress || !at.addr.IsLoopback()) {
		return fmt.Errorf("host address %s is wider than the configuration allows: set expose (on a host: bind) there, or hostAddress of a rule", at)
	}
	return nil
}

// MayExpose returns why a run-time rule that exposes ports of a guest at a host address
// would never have an effect.
func (s *Set) MayExpose(m Match, at HostAddress) error {
	if err := s.mayAllow(m); err != nil {
		return err
	}
	if at == Loopback() || at.addr.IsLoopback() {
		return fmt.Errorf("host address %s: other machines do not reach it: want all or an address that they reach", at)
	}
	for _, loopback := range []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
		if a := at.of(loopback); !a.IsLoopback() && s.expose.limit(a) == a || at == All() && !s.expose.limit(a).IsLoopback() {
			return nil
		}
	}
	return fmt.Errorf("host address %s is wider than the configuration allows, which has bind: %s: set bind: asked (--bind asked) there, and ports are on the loopback until they are exposed", at, s.expose)
}

// mayAllow returns why the configuration denies the ports whatever serves them.
func (s *Set) mayAllow(m Match) error {
	want := rule{Rule: Rule{Match: m}}
	for i := range s.rules {
		if r := &s.rules[i]; r.Deny && r.covers(&want) {
			return fmt.Errorf("%s of the configuration denies it: change that rule", r.ref)
		} else if !r.Deny && r.overlaps(m) {
			break // this one may decide before
		}
	}
	return nil
}

// overlaps reports whether r can match a port that m names.
func (r *rule) overlaps(m Match) bool {
	return (r.Match.Protocol == 0 || r.Match.Protocol == m.Protocol) &&
		(len(r.Match.Ports) == 0 || slices.ContainsFunc(m.Ports, func(q PortRange) bool { return InRanges(r.Match.Ports, q.First) }))
}

// Overlaps reports whether listeners at h and o, with one port, can exclude each other.
func (h HostAddress) Overlaps(o HostAddress) bool {
	if h.kind != oneAddress || o.kind != oneAddress || h.addr.IsUnspecified() || o.addr.IsUnspecified() {
		return true
	}
	return h.addr == o.addr
}

// Names reports whether the fields about guests, protocols and ports match; the others do
// not count.
func (m *Match) Names(guest string, protocol port.Protocol, n uint16) bool {
	return (m.Guest == "" || glob(m.Guest, guest)) && (m.Protocol == 0 || m.Protocol == protocol) && m.hasPort(n)
}

// Matches reports whether all fields match a publication of a guest, whose owner is known.
func (m *Match) Matches(guest string, p *port.Publication) bool {
	return m.Names(guest, p.Protocol, p.Port) && m.hasAddress(p) && m.hasSource(p) && (m.Demand.IsZero() || p.Demanded(m.Demand)) && m.MatchesOwner(p.Owner)
}
