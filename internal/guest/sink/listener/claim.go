// SPDX-License-Identifier: Apache-2.0

package listener

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/claims"
)

// claim is one publication's wish for one host address. All is guarded by Sink.mu.
type claim struct {
	at      netip.AddrPort
	group   *group
	pub     port.Publication
	outcome port.Outcome
}

// groupKey names the addresses that can overlap. A claim of any free port, 0, is
// alone in its group.
type groupKey struct {
	port.Slot
	is4 bool
	any port.Key
}

// group is the claims to one port, and the addresses that they are given.
type group struct {
	key    groupKey
	claims map[*claim]struct{}
	given  map[netip.Addr]*placeholder
}

// groupOf returns the group of a claim, new if there is none.
func (s *Sink) groupOf(c *claim) *group {
	k := groupKey{Slot: port.Slot{Protocol: c.pub.Protocol, Port: c.at.Port()}, is4: c.at.Addr().Is4()}
	if c.at.Port() == 0 {
		k.any = c.pub.Key
	}
	g := s.groups[k]
	if g == nil {
		g = &group{key: k, claims: make(map[*claim]struct{}), given: make(map[netip.Addr]*placeholder)}
		s.groups[k] = g
	}
	return g
}

// assign gives each address of a group to one claim. If the wildcard turns out not to
// be available, narrower addresses of its server are opened instead.
func (s *Sink) assign(g *group, now time.Time) {
	was := maps.Clone(g.given)
	if h := g.wildcard(); h != nil && h.beside && g.servedAt(h.at) {
		h.beside = false
	}
	s.assignOnce(g, was, now)
	h := g.wildcard()
	switch {
	case h == nil || !h.failed:
	case !h.beside:
		h.beside = true
		if s.assignOnce(g, was, now); len(g.given) > 1 {
			s.due.Set(h, now.Add(h.rare.Next()))
		} else {
			h.beside = false
		}
	case len(g.given) == 1: // the narrower addresses are not claimed any more
		s.again(h, now)
	}
}

// wildcard returns the placeholder of the family's wildcard, nil if there is none.
func (g *group) wildcard() *placeholder {
	return cmp.Or(g.given[netip.IPv4Unspecified()], g.given[netip.IPv6Unspecified()])
}

// servedAt reports whether a socket of a claim's publication listens at an address that
// it claims.
func (g *group) servedAt(at netip.AddrPort) bool {
	for c := range g.claims {
		if c.at == at && servedBy(&c.pub, at) == byItself {
			return true
		}
	}
	return false
}

// again updates a placeholder whose time has come. A wildcard is tried before the
// narrower addresses that are open beside it.
func (s *Sink) again(h *placeholder, now time.Time) {
	if !port.IsWildcard(h.at.Addr()) {
		s.update(h, now)
		return
	}
	if h.beside {
		h.busy = false // without a settle time, in which nothing would be open
	}
	h.beside, h.failed = false, false
	s.assign(h.winner.group, now)
}

// unavailable reports whether the wildcard that c asks for cannot be opened: an attempt
// failed, or a socket is known to be in the way.
func (s *Sink) unavailable(c *claim) bool {
	if !port.IsWildcard(c.at.Addr()) || c.at.Port() == 0 {
		return false
	}
	if h := c.group.given[c.at.Addr()]; h != nil && (h.beside || h.listener != nil) {
		return h.beside
	}
	return servedBy(&c.pub, c.at) != byItself && holder(s.o.Sockets(c.group.key.Slot), c.at) != ""
}

// assignOnce gives each address of a group to one claim; see package claims. was are
// the placeholders that may be used again.
func (s *Sink) assignOnce(g *group, was map[netip.Addr]*placeholder, now time.Time) {
	all := slices.Collect(maps.Keys(g.claims))
	asked := make([]claims.Claim, 0, len(all))
	// Nobody can take from a server of the guest what it has here.
	itself := slices.ContainsFunc(all, func(c *claim) bool { return servedBy(&c.pub, c.at) != notServed })
	for _, c := range all {
		a := claims.Of(&c.pub, c.at)
		if itself {
			a.Standing = claims.Own
		}
		a.Unavailable = s.unavailable(c)
		asked = append(asked, a)
	}
	winners := make(map[netip.Addr]*claim)
	served := make(map[*claim][]*claim)
	for i, v := range claims.Decide(asked) {
		c, by := all[i], all[v.Winner]
		switch {
		case v.Conflict:
			s.set(c, port.Conflict, c.at, claims.Held(by.at, asked[v.Winner].String()))
		case by == c:
			winners[c.at.Addr()] = c
		default:
			served[by] = append(served[by], c)
		}
	}
	for addr, h := range g.given {
		if winners[addr] == nil {
			s.shut(h)
			s.due.Cancel(h)
			delete(g.given, addr)
			delete(s.placeholders, h)
		}
	}
	for _, c := range winners {
		s.give(g, was, c, served[c], now)
	}
	if len(g.claims) == 0 {
		delete(s.groups, g.key)
	}
}

// give has c served at an address, and others by it.
func (s *Sink) give(g *group, was map[netip.Addr]*placeholder, c *claim, others []*claim, now time.Time) {
	addr := c.at.Addr()
	h := g.given[addr]
	if h == nil {
		if h = was[addr]; h == nil {
			h = newPlaceholder(g.key.Protocol, c.at, now)
			h.takeOver(was)
		}
		g.given[addr] = h
		s.placeholders[h] = struct{}{}
	}
	if h.winner == nil || h.winner.pub.Key != c.pub.Key { // it was released for another publication's server
		h.until, h.had = time.Time{}, false
		h.rest.Reset()
	}
	h.winner, h.shared = c, others
	s.update(h, now)
}

// report sets the outcome of the claims that a placeholder serves.
func (s *Sink) report(h *placeholder, state port.State, at netip.AddrPort, reason port.Reason) {
	h.state, h.reason = state, reason
	s.set(h.winner, state, at, reason)
	for _, c := range h.shared {
		s.set(c, state, c.at, reason)
	}
}

// set sets the outcome of a claim.
func (s *Sink) set(c *claim, state port.State, at netip.AddrPort, reason port.Reason) {
	o := port.Outcome{State: state, HostAddress: at, Reason: reason}
	if !c.outcome.Equal(o) {
		c.outcome = o
		s.dirty[c.pub.Key] = struct{}{}
	}
}

// overlap reports whether a socket at a excludes one at b.
func overlap(a, b netip.Addr) bool {
	return a.Is4() == b.Is4() && (a == b || port.IsWildcard(a) || port.IsWildcard(b))
}

// served is how a publication is served at a host address without a placeholder.
type served uint8

const (
	notServed  served = iota
	byIPv6Only        // a socket of the publication listens at ::, which a relay shows at ::1 only
	byItself          // a socket of the publication listens there
)

// servedBy reports whether p has a socket of its own that a relay shows at the host
// address that p asks for. What only keeps others from the port is shown too; a NAT rule
// takes the relay's connections if it is dialled there.
func servedBy(p *port.Publication, at netip.AddrPort) served {
	switch {
	case at.Port() != p.Port, p.Address != port.Loopback(p.Address) && !port.IsWildcard(p.Address),
		port.IsWildcard(at.Addr()) && !port.IsWildcard(p.Address):
		return notServed
	}
	best := notServed
	for i := range p.Origins {
		o := &p.Origins[i]
		if o.Source != port.SourceSocket || !o.Withheld.IsZero() && !(o.Withheld.Code() == port.Reserved && slices.Contains(p.Dial, at)) {
			continue
		}
		switch {
		case !slices.ContainsFunc(o.Dial, func(a netip.AddrPort) bool { return a.Addr().Is4() == at.Addr().Is4() }):
		case o.Mapped && p.Protocol == port.TCP:
			best = byIPv6Only
		default:
			return byItself
		}
	}
	return best
}

// holder describes the socket that excludes another at an address, "" if none is
// known.
func holder(all []port.Publication, at netip.AddrPort) string {
	for i := range all {
		p := &all[i]
		if !overlap(p.Address, at.Addr()) {
			continue
		}
		for _, o := range p.Origins {
			if o.Source != port.SourceSocket {
				continue
			}
			text := strconv.Quote(o.Detail.String())
			if !o.Withheld.IsZero() {
				text += " (" + o.Withheld.String() + ")"
			}
			return text
		}
	}
	return ""
}

// dockerRule reports whether Docker wrote one of the NAT rules of p.
func dockerRule(p *port.Publication) bool {
	return slices.ContainsFunc(p.Origins, func(o port.OriginInfo) bool { return o.Maker == port.MakerDocker || o.Maker == port.MakerSwarm })
}

// onlyRules reports whether p has no other origins than NAT rules.
func onlyRules(p *port.Publication) bool {
	return !slices.ContainsFunc(p.Origins, func(o port.OriginInfo) bool { return o.Source != port.SourceNAT })
}

// settleTime is how long p must be without a socket. Docker writes a rule before it
// starts the proxy that is to have the port, and reports that the container runs
// only after that. A proxy that was there ends when Docker is restarted while its
// containers go on, and comes back later.
func (s *Sink) settleTime(p *port.Publication, hadSocket bool) time.Duration {
	switch {
	case !dockerRule(p):
		return s.o.Settle
	case hadSocket:
		return absences * s.o.ProxySettle
	case onlyRules(p):
		return s.o.ProxySettle
	}
	return s.o.Settle
}

// absences is how many times ProxySettle a proxy of Docker's may be away.
const absences = 6
