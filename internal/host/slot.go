// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/claims"
	"github.com/fairlead/fairlead/internal/compact"
	"github.com/fairlead/fairlead/internal/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	retryFirst  = 250 * time.Millisecond
	conflictMax = 10 * time.Second // between attempts at an address that is taken
	failureMax  = 30 * time.Second // between attempts at one that cannot be had
	retrySlack  = 20 * time.Millisecond
	holderAge   = time.Minute // before a holder is looked up again

	// Between attempts at a wildcard that cannot be had while narrower addresses of
	// its server are open: these are closed for a moment each time.
	besideFirst = 30 * time.Second
	besideMax   = 10 * time.Minute
)

// publication is what one guest asks for. All is guarded by Host.mu; guest and
// Key never change.
type publication struct {
	guest *guest
	port.Key
	fact   *port.Fact    // immutable
	claims []*claim      // one per host address, in the policy's order
	denied *port.Outcome // instead of claims
	tries  int           // other ports that were tried since the last decision about it

	onConflict port.OnConflict
	exposed    time.Time // see Row.Exposed
	since      time.Time
}

func (p *publication) id() ID { return ID{p.guest.name, p.Key} }

func (p *publication) outcomes() []port.Outcome {
	if p.denied != nil {
		return []port.Outcome{*p.denied}
	}
	out := make([]port.Outcome, 0, len(p.claims))
	for _, c := range p.claims {
		if !p.covered(c) {
			out = append(out, c.outcome)
		}
	}
	return out
}

// covered reports whether a claim of an exposed port is served by the wildcard that the port
// is exposed at.
func (p *publication) covered(c *claim) bool {
	return !p.exposed.IsZero() && slices.ContainsFunc(p.claims, func(w *claim) bool {
		return w != c && w.outcome.State == port.Active && port.IsWildcard(w.addr.Addr()) && claims.Overlap(w.addr, c.addr)
	})
}

func (p *publication) view() Row {
	return Row{
		Guest: p.guest.name, Fact: p.fact, Outcomes: p.outcomes(), Since: p.since, Exposed: p.exposed,
		Lost: p.guest.away || p.guest.kept.has(p.Key),
	}
}

// claim is one publication's wish for one host address. guest, key and addr never
// change; the rest changes under Host.mu.
type claim struct {
	guest *guest
	key   port.Key
	addr  netip.AddrPort
	names []string // by which pub was asked for when the claim was made; nil if it is there by itself

	pub      *publication
	admitted bool // within the guest's limit
	gone     atomic.Bool
	place    int   // in group.claims
	slot     *slot // of a claim of any free port
	outcome  port.Outcome
}

// isOf reports whether the server of a claim is still that of a publication at its address: if the
// claim was made for what is asked for by name, one of the names is the same. h.mu is held.
func (c *claim) isOf(pub *publication) bool {
	return len(c.names) == 0 || slices.ContainsFunc(c.names, func(d string) bool { return slices.Contains(pub.fact.Demands(), d) })
}

// holds is why a claim of a guest does not get what overlaps an address that this one has.
func (c *claim) holds(at netip.AddrPort, from *guest) port.Reason {
	code := port.HeldBy
	if c.guest != from {
		code = port.HeldByRival
	}
	return port.Because(code, at.String(), claims.Name(c.key, c.guest.name, c.pub.fact.Owner))
}

func (c *claim) set(state port.State, addr netip.AddrPort, reason port.Reason) {
	if state == port.Active {
		reason = c.pub.note(addr)
	}
	o := port.Outcome{State: state, HostAddress: addr, Reason: reason}
	if c.gone.Load() || c.outcome.Equal(o) {
		return
	}
	o.Since = c.outcome.Since
	if o.State != c.outcome.State || o.HostAddress != c.outcome.HostAddress {
		o.Since = time.Now()
		// At debug level, because the guest decides how often this happens.
		c.guest.log.Debug("port changed", "publication", c.key, "state", state, "owner", c.pub.fact.Owner.Name,
			"at", addr, "reason", reason)
	}
	c.outcome = o
	c.guest.h.changed[c.pub] = struct{}{}
}

// groupKey names host addresses that can overlap: a wildcard takes its port on all
// addresses of its family.
type groupKey struct {
	port.Slot
	is4 bool
}

func (c *claim) group() groupKey {
	return groupKey{port.Slot{Protocol: c.key.Protocol, Port: c.addr.Port()}, c.addr.Addr().Is4()}
}

// group is the claims to one port, and the addresses that they are given. Guarded by
// Host.mu.
type group struct {
	key    groupKey
	claims []*claim
	guests []*guest // that have claims, in the order in which they came
	slots  []*slot  // sorted by address
}

// enter adds a claim.
func (g *group) enter(c *claim) {
	c.place = len(g.claims)
	g.claims = append(g.claims, c)
}

// drop removes a claim.
func (g *group) drop(c *claim) {
	last := len(g.claims) - 1
	g.claims[c.place] = g.claims[last]
	g.claims[c.place].place = c.place
	g.claims[last] = nil
	g.claims = g.claims[:last]
}

// find returns the place of an address in g.slots, and whether it has one.
func (g *group) find(ip netip.Addr) (i int, ok bool) {
	return slices.BinarySearchFunc(g.slots, ip, func(s *slot, ip netip.Addr) int { return s.addr.Addr().Compare(ip) })
}

// at returns the slot of an address, nil if there is none.
func (g *group) at(ip netip.Addr) *slot {
	if i, ok := g.find(ip); ok {
		return g.slots[i]
	}
	return nil
}

// join enters a claim that is within the limit.
func (h *Host) join(ctx context.Context, c *claim) {
	c.admitted = true
	c.set(port.Pending, c.addr, port.Reason{})
	if c.addr.Port() == 0 {
		c.slot = h.newSlot(c.key.Protocol, c.addr)
		c.slot.winner.Store(c)
		c.slot.open(ctx)
		return
	}
	k := c.group()
	g := h.groups[k]
	if g == nil {
		g = &group{key: k}
		h.groups[k] = g
	}
	g.enter(c)
	if !slices.Contains(g.guests, c.guest) {
		g.guests = append(g.guests, c.guest)
	}
	h.touched[g] = struct{}{}
}

// leave ends a claim.
func (h *Host) leave(c *claim) {
	if c.gone.Swap(true) || !c.admitted {
		return
	}
	if c.slot != nil {
		c.slot.close()
		return
	}
	g := h.groups[c.group()]
	g.drop(c)
	h.touched[g] = struct{}{}
}

// touch has the addresses that a publication claims decided again: its owner changed.
func (h *Host) touch(p *publication) {
	for _, c := range p.claims {
		if g := h.groups[c.group()]; g != nil && c.admitted && c.slot == nil {
			h.touched[g] = struct{}{}
		}
	}
}

// commit ends a step: it admits claims up to the limit, decides what was touched, moves
// what rules move on a conflict, and publishes the result. h.mu is held.
func (h *Host) commit(ctx context.Context) {
	h.renew()
	for again := true; again; again = h.move() {
		for _, g := range h.guests {
			g.admit(ctx)
		}
		for g := range h.touched {
			g.decide(ctx, h)
		}
		h.touched = compact.Clear(h.touched)
	}
	h.publish()
}

// decide gives each host address to one claim. If the wildcard turns out not to be
// available, narrower addresses of its server are opened instead.
func (g *group) decide(ctx context.Context, h *Host) {
	g.assign(ctx, h)
	s := g.wildcard()
	switch {
	case s == nil || !s.failed:
	case !s.beside:
		s.beside = true
		if g.assign(ctx, h); len(g.slots) > 1 {
			s.plan(&s.trouble().rare)
		} else {
			s.beside = false
		}
	case len(g.slots) == 1: // the narrower addresses are not claimed any more
		s.beside = false
		s.trouble().rare.Reset()
		s.trouble().pause.Reset()
		s.open(ctx)
	}
}

// wildcard returns the slot of the family's wildcard, nil if it is not claimed.
func (g *group) wildcard() *slot {
	// The wildcard of a family sorts before its other addresses.
	if len(g.slots) > 0 && port.IsWildcard(g.slots[0].addr.Addr()) {
		return g.slots[0]
	}
	return nil
}

// retry tries again to open s.
func (h *Host) retry(ctx context.Context, s *slot) {
	if !s.beside {
		s.open(ctx)
		return
	}
	s.failed, s.beside = false, false // decide tries it before narrower addresses
	h.touched[h.groups[groupKey{port.Slot{Protocol: s.protocol, Port: s.addr.Port()}, s.addr.Addr().Is4()}]] = struct{}{}
}

// assign gives each host address to one claim; see package claims.
func (g *group) assign(ctx context.Context, h *Host) {
	all := g.claims
	winners := make(map[netip.Addr]*claim)
	served := make(map[*claim][]*claim)
	for i, v := range claims.Decide(g.asked(all)) {
		c, by := all[i], all[v.Winner]
		switch {
		case v.Conflict:
			c.set(port.Conflict, c.addr, by.holds(by.addr, c.guest))
		case by == c:
			winners[c.addr.Addr()] = c
		default:
			served[by] = append(served[by], c)
		}
	}
	g.slots = slices.DeleteFunc(g.slots, func(s *slot) bool {
		lost := winners[s.addr.Addr()] == nil
		if lost {
			s.close()
		}
		return lost
	})
	for ip, c := range winners {
		g.give(ctx, h, ip, c, served[c])
	}
	if len(g.claims) == 0 {
		delete(h.groups, g.key)
	}
}

// asked returns the claims as package claims wants them. It forgets the guests
// that have none left.
func (g *group) asked(all []*claim) []claims.Claim {
	has := make(map[*guest]bool)
	for _, c := range all {
		has[c.guest] = true
	}
	g.guests = slices.DeleteFunc(g.guests, func(v *guest) bool { return !has[v] })
	out := make([]claims.Claim, 0, len(all))
	for _, c := range all {
		w := c.pub.fact
		s := g.at(c.addr.Addr())
		standing := claims.StandingOf(c.key, c.addr, len(w.Demands()) > 0)
		if !c.pub.instead(c.addr.Port()).IsZero() {
			standing = claims.Moved
		}
		out = append(out, claims.Claim{
			Guest: slices.Index(g.guests, c.guest), Key: c.key, Owner: w.Owner, Target: w.Target, Host: c.addr,
			Unavailable: s != nil && s.beside, Kept: c.guest.kept.has(c.key),
			Standing: standing,
			// A rule of this host that gives the port another number is its own word.
			Yields: w.Decision.Yields && slices.ContainsFunc(w.Decision.Host, func(a netip.AddrPort) bool { return a.Port() == c.addr.Port() }),
		})
	}
	return out
}

// give has c served at an address, and others by it.
func (g *group) give(ctx context.Context, h *Host, ip netip.Addr, c *claim, others []*claim) {
	i, ok := g.find(ip)
	if !ok {
		s := h.newSlot(g.key.Protocol, c.addr)
		g.slots = slices.Insert(g.slots, i, s)
		s.winner.Store(c)
		s.shared = others
		s.open(ctx)
		return
	}
	s := g.slots[i]
	if old := s.winner.Swap(c); old != c && s.udp != nil {
		s.udp.retarget(c)
	}
	s.shared = others
	if s.listener == nil && !s.failed { // to be tried again
		s.open(ctx)
		return
	}
	s.show()
}

// slot is one host address that some claim is given. h, protocol and addr never
// change, winner changes under Host.mu; the rest is guarded by Host.mu.
type slot struct {
	h        *Host
	protocol port.Protocol
	tried    uint16 // the number that was tried last: of any free port 0, or that of the other family
	addr     netip.AddrPort
	winner   atomic.Pointer[claim] // never nil once open
	shared   []*claim              // others that the winner serves

	listener io.Closer // nil when not open
	udp      *udpPort  // the listener, if it is one
	bound    netip.AddrPort
	state    port.State
	reason   port.Reason
	past     *trouble // nil if no attempt has failed since it was open; see trouble
	failed   bool     // the last attempt failed
	beside   bool     // so narrower addresses are opened beside it; only of a wildcard
	closed   bool
}

// trouble is what a slot keeps of attempts that failed. Few slots have any.
type trouble struct {
	pause    schedule.Backoff
	rare     schedule.Backoff // the pause beside narrower addresses
	why      port.Reason      // with the holder, none while no holder is known
	asked    time.Time        // when the holder was last looked up
	whyState port.State       // that goes with why
	kind     listenError      // of the last attempt
}

func (h *Host) newSlot(protocol port.Protocol, addr netip.AddrPort) *slot {
	s := &slot{h: h, protocol: protocol, addr: addr, tried: addr.Port(), state: port.Pending}
	if addr.Port() == 0 {
		h.anyPort[s] = struct{}{}
	}
	return s
}

// trouble returns what s keeps of attempts that failed.
func (s *slot) trouble() *trouble {
	if s.past == nil {
		s.past = &trouble{rare: schedule.Backoff{Min: besideFirst, Max: besideMax}}
	}
	return s.past
}

// open tries to listen, and plans the next attempt if that fails.
func (s *slot) open(ctx context.Context) {
	if s.closed || s.listener != nil {
		return
	}
	s.tried = s.number()
	if held, ok := s.h.heldFor(s.protocol, s.at()); ok { // as long as this program runs
		s.failed = true
		s.state, s.reason = port.Conflict, claims.Held(held.At, held.By)
		s.show()
		return
	}
	err := s.listen(ctx)
	s.failed = err != nil
	if err == nil {
		s.beside, s.past = false, nil
		s.state, s.reason = port.Active, port.Reason{}
		s.h.stats.listeners.Add(1)
		s.show()
		return
	}
	if ctx.Err() != nil {
		return
	}
	limit := failureMax
	t := s.trouble()
	if kind := kindOf(err); kind != t.kind { // what was found out explains another error
		t.kind, t.why, t.asked = kind, port.Reason{}, time.Time{}
	}
	switch t.kind {
	case inUse:
		limit = conflictMax
		s.h.stats.conflicts.Add(1)
		if by := s.h.heldByUs(s); by != nil {
			t.why, t.asked = port.Reason{}, time.Time{}
			s.state, s.reason = port.Conflict, by.winner.Load().holds(by.bound, s.winner.Load().guest)
			break
		}
		s.state, s.reason = t.whyState, t.why
		if t.why.IsZero() {
			s.state, s.reason = port.Conflict, port.Because(port.InUse, s.at().String())
		}
		s.findHolder()
	case forbidden:
		c := s.winner.Load()
		demand := ""
		if list := c.pub.fact.Demands(); len(list) > 0 {
			demand = list[0]
		}
		guest := ""
		if len(s.h.opt.Guests) > 1 {
			guest = c.guest.name
		}
		run := "run " + forwards.Elsewhere(c.key.Slot(), demand, guest, s.at().Port())
		s.fail(cmp.Or(t.why, port.Because(port.NotPermitted, s.at().String(), forbiddenHint(s.at(), run))))
		if forbiddenHasHolder {
			s.findHolder()
		}
	case noAddress:
		s.fail(port.Because(port.NotOfHost, s.addr.Addr().String()))
	default:
		s.fail(port.Because(port.SystemFailed, err.Error()))
	}
	s.retryIn(limit)
	s.show()
}

// at returns the address that was tried last.
func (s *slot) at() netip.AddrPort { return netip.AddrPortFrom(s.addr.Addr(), s.tried) }

// number returns the port number that is tried: of any free port one that the other family of
// the port has, so that both have one number, or 0 if there is none or it could not be had.
func (s *slot) number() uint16 {
	if s.addr.Port() != 0 || s.failed {
		return s.addr.Port()
	}
	p := s.winner.Load().pub
	open := slices.Clone(p.claims)
	if o := p.otherFamily(); o != nil {
		open = append(open, o.claims...)
	}
	open = slices.DeleteFunc(open, func(c *claim) bool { return c.slot == nil || c.slot.listener == nil })
	for _, c := range open {
		n := c.slot.bound.Port()
		here := func(o *claim) bool { return o.slot.bound.Port() == n && o.addr.Addr().Is4() == s.addr.Addr().Is4() }
		if !slices.ContainsFunc(open, here) {
			return n
		}
	}
	return 0
}

// retryIn plans the next attempt, after limit at the latest.
func (s *slot) retryIn(limit time.Duration) {
	pause := &s.trouble().pause
	pause.Min, pause.Max = retryFirst, limit
	s.plan(pause)
}

// plan plans the next attempt after a pause.
func (s *slot) plan(pause *schedule.Backoff) {
	s.h.retries.Set(s, time.Now().Add(pause.Next()))
	s.h.timers.Notify()
}

// findHolder has the holder looked up, unless that was done a short while ago.
func (s *slot) findHolder() {
	if t := s.trouble(); time.Since(t.asked) >= holderAge {
		t.asked = time.Now()
		s.h.unheld[s] = struct{}{}
		s.h.lookup.Notify()
	}
}

func (s *slot) fail(reason port.Reason) {
	s.h.stats.failures.Add(1)
	s.state, s.reason = port.Failed, reason
}

// network returns name with the family of the slot: a :: listener takes IPv6 only.
func (s *slot) network() string {
	if s.addr.Addr().Is4() {
		return s.protocol.String() + "4"
	}
	return s.protocol.String() + "6"
}

func (s *slot) listen(ctx context.Context) error {
	if v, ok := s.h.opt.Holders.(Vetter); ok && s.at().Port() != 0 && v.Taken(ctx, Socket{s.protocol, s.at()}) {
		return errTaken
	}
	if s.protocol == port.UDP {
		pc, err := s.h.opt.Network.ListenPacket(ctx, s.network(), s.at().String())
		if err != nil {
			return err
		}
		p := newUDPPort(s, pc)
		s.listener, s.udp, s.bound = p, p, addrOf(pc.LocalAddr(), s.at())
		s.h.wg.Go(func() { p.run(ctx) })
		return nil
	}
	ln, err := s.h.opt.Network.Listen(ctx, s.network(), s.at().String())
	if err != nil {
		return err
	}
	s.listener, s.bound = s.accept(ctx, ln), addrOf(ln.Addr(), s.at())
	return nil
}

// show reports the slot's state for its winner, and for the claims that the winner
// serves as well at the addresses that they ask for.
func (s *slot) show() {
	addr := s.at()
	if s.listener != nil {
		addr = s.bound
	}
	s.winner.Load().set(s.state, addr, s.reason)
	for _, c := range s.shared {
		c.set(s.state, c.addr, s.reason)
	}
}

// close stops listening; flows that run go on.
func (s *slot) close() {
	if s.closed {
		return
	}
	s.closed = true
	s.shut()
	delete(s.h.anyPort, s)
	s.h.retries.Cancel(s)
	delete(s.h.unheld, s)
}

func (s *slot) shut() {
	if s.listener == nil {
		return
	}
	_ = s.listener.Close()
	s.listener, s.udp = nil, nil
	s.h.stats.listeners.Add(-1)
}

// died handles a listener that failed by itself. h.mu is not held.
func (s *slot) died(ctx context.Context, listener io.Closer, err error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if s.closed || s.listener != listener || ctx.Err() != nil {
		return
	}
	s.shut()
	s.fail(port.Because(port.SystemFailed, err.Error()))
	s.failed = true
	s.trouble().pause.Reset()
	s.retryIn(failureMax)
	s.show()
	s.h.publish()
}

// heldByUs returns the slot of ours that holds the address of s, if any. It can only
// be one of any free port that was given the port that s wants.
func (h *Host) heldByUs(s *slot) *slot {
	for o := range h.anyPort {
		if o != s && o.listener != nil && o.protocol == s.protocol && claims.Overlap(o.bound, s.at()) {
			return o
		}
	}
	return nil
}

// addrOf returns the address of a listener, or asked if it has none.
func addrOf(a net.Addr, asked netip.AddrPort) netip.AddrPort {
	if v, ok := a.(interface{ AddrPort() netip.AddrPort }); ok {
		ap := v.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return asked
}
