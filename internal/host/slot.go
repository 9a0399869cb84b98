// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/claims"
	"github.com/fairlead/fairlead/internal/port/schedule"
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

// publication is what one guest asks for. guest and Key never change.
type publication struct {
	guest *lockedGuest
	port.Key
	fact   *port.Fact     // immutable
	claims []*claim       // one per host address, in the policy's order
	denied *port.Outcome  // instead of claims
	kept   *chan struct{} // see target.kept; nil if the publication is not kept
	tries  int            // other ports that were tried since the last decision about it

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
		Lost: p.guest.away || p.kept != nil,
	}
}

// wanted returns the addresses that a decision gives the publication, each once.
func (p *publication) wanted(d port.Decision) (out []netip.AddrPort) {
	for _, a := range d.Host {
		a = netip.AddrPortFrom(a.Addr().Unmap(), p.portFor(a.Port()))
		if d.Allow && a.Addr().IsValid() && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// deny notes why the publication has no claims, a zero reason if it has some.
func (p *publication) deny(reason port.Reason, pending bool) {
	if reason.IsZero() {
		p.denied = nil
		return
	}
	if p.denied != nil && p.denied.Reason == reason {
		return
	}
	p.guest.h.changed[p] = struct{}{}
	p.denied = &port.Outcome{State: port.Denied, Reason: reason, Since: time.Now()}
	if pending {
		p.denied.State = port.Pending
	}
}

// target is where connections to the address of a claim are led. It needs no lock.
type target struct {
	guest *guest
	key   port.Key
	addr  netip.AddrPort
	names []string                      // by which the port was asked for when the claim was made; nil if it is there by itself
	gone  atomic.Bool                   // the claim has ended
	kept  atomic.Pointer[chan struct{}] // closed when the publication is not kept any more; nil if it never was
}

// isOf reports whether a target leads to the server of a port that has these names now: one
// of those that it was asked for by is the same.
func (t *target) isOf(names []string) bool {
	return len(t.names) == 0 || slices.ContainsFunc(t.names, func(d string) bool { return slices.Contains(names, d) })
}

// claim is one publication's wish for one host address.
type claim struct {
	target
	pub      *publication
	admitted bool  // within the guest's limit
	place    int   // in group.claims
	slot     *slot // of a claim of any free port
	outcome  port.Outcome
}

func newClaim(pub *publication, addr netip.AddrPort) *claim {
	c := &claim{pub: pub}
	c.kept.Store(pub.kept)
	c.guest, c.key, c.addr = pub.guest.guest, pub.Key, addr
	if pub.fact.Source == port.SourceDemand {
		c.names = pub.fact.Demands()
	}
	c.outcome = port.Outcome{State: port.Pending, HostAddress: addr, Since: time.Now()}
	return c
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
	switch state {
	case port.Active:
		reason = c.pub.note(addr)
	case port.Conflict:
		reason = c.pub.remains(reason)
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
	c.pub.guest.h.changed[c.pub] = struct{}{}
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

// group is the claims to one port, and the addresses that they are given.
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
func (h *locked) join(c *claim) {
	c.admitted = true
	c.set(port.Pending, c.addr, port.Reason{})
	if c.addr.Port() == 0 {
		c.slot = h.newSlot(c.key.Protocol, c.addr)
		h.anyPort[c.slot] = struct{}{}
		c.slot.serve(c, nil)
		c.slot.open()
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

// touch has the addresses that a publication claims decided again: its owner changed.
func (h *locked) touch(p *publication) {
	for _, c := range p.claims {
		if g := h.groups[c.group()]; g != nil && c.admitted && c.slot == nil {
			h.touched[g] = struct{}{}
		}
	}
}

// decide gives each host address to one claim. If the wildcard turns out not to be
// available, narrower addresses of its server are opened instead.
func (g *group) decide(h *locked) {
	g.assign(h)
	s := g.wildcard()
	switch {
	case s == nil || !s.failed:
	case !s.beside:
		s.beside = true
		if g.assign(h); len(g.slots) > 1 {
			s.later(&s.trouble().rare, besideMax)
		} else {
			s.beside = false
		}
	case len(g.slots) == 1: // the narrower addresses are not claimed any more
		s.beside = false
		s.trouble().rare.Reset()
		s.trouble().pause.Reset()
		s.open()
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

// assign gives each host address to one claim; see package claims.
func (g *group) assign(h *locked) {
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
		g.give(h, ip, c, served[c])
	}
	if len(g.claims) == 0 {
		delete(h.groups, g.key)
	}
}

// asked returns the claims as package claims wants them. It forgets the guests
// that have none left.
func (g *group) asked(all []*claim) []claims.Claim {
	g.guests = slices.DeleteFunc(g.guests, func(v *guest) bool {
		return !slices.ContainsFunc(all, func(c *claim) bool { return c.guest == v })
	})
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
			Unavailable: s != nil && s.beside, Kept: c.pub.kept != nil,
			Standing: standing,
			// A rule of this host that gives the port another number is its own word.
			Yields: w.Decision.Yields && slices.ContainsFunc(w.Decision.Host, func(a netip.AddrPort) bool { return a.Port() == c.addr.Port() }),
		})
	}
	return out
}

// give has c served at an address, and others by it.
func (g *group) give(h *locked, ip netip.Addr, c *claim, others []*claim) {
	i, ok := g.find(ip)
	if !ok {
		g.slots = slices.Insert(g.slots, i, h.newSlot(g.key.Protocol, c.addr))
	}
	s := g.slots[i]
	s.serve(c, others)
	if s.listener == nil && !s.failed { // it is new, or to be tried again
		s.open()
	} else {
		s.show()
	}
}

// door is a slot as its connections see it. It needs no lock.
type door struct {
	h        *Host
	protocol port.Protocol
	closed   atomic.Bool // set by steps alone
	addr     netip.AddrPort
	to       atomic.Pointer[target] // of the winner, never nil once open
}

// slot is one host address that some claim is given.
type slot struct {
	door
	h      *locked
	winner *claim   // never nil once open
	shared []*claim // others that the winner serves

	listener io.Closer // nil when not open
	bound    netip.AddrPort
	reason   port.Reason
	past     *trouble // nil if no attempt has failed since it was open; see trouble
	tried    uint16   // the number that was tried last: of any free port 0, or that of the other family
	state    port.State
	failed   bool // the last attempt failed
	beside   bool // so narrower addresses are opened beside it; only of a wildcard
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

func (h *locked) newSlot(protocol port.Protocol, addr netip.AddrPort) *slot {
	s := &slot{h: h, tried: addr.Port(), state: port.Pending}
	s.door.h, s.protocol, s.addr = h.Host, protocol, addr
	return s
}

// serve gives the slot to a claim, which serves others as well.
func (s *slot) serve(c *claim, others []*claim) {
	old := s.winner
	s.winner, s.shared = c, others
	s.to.Store(&c.target)
	if u, ok := s.listener.(*udpPort); ok && old != c {
		u.retarget(&c.target)
	}
}

// retry tries again to open s.
func (s *slot) retry() {
	if !s.beside {
		s.open()
		return
	}
	s.failed, s.beside = false, false // decide tries it before narrower addresses
	s.h.touched[s.h.groups[s.winner.group()]] = struct{}{}
}

// trouble returns what s keeps of attempts that failed.
func (s *slot) trouble() *trouble {
	if s.past == nil {
		s.past = &trouble{pause: schedule.Backoff{Min: retryFirst}, rare: schedule.Backoff{Min: besideFirst}}
	}
	return s.past
}

// open tries to listen, and plans the next attempt if that fails.
func (s *slot) open() {
	if s.closed.Load() || s.listener != nil {
		return
	}
	s.tried = s.number()
	if held, ok := s.h.heldFor(s.protocol, s.at()); ok { // as long as this program runs
		s.failed = true
		s.state, s.reason = port.Conflict, claims.Held(held.At, held.By)
		s.show()
		return
	}
	err := s.listen(s.h.ctx)
	s.failed = err != nil
	switch {
	case err == nil:
		s.beside, s.past = false, nil
		s.state, s.reason = port.Active, port.Reason{}
		s.h.stats.listeners.Add(1)
	case s.h.ctx.Err() != nil:
		return
	default:
		limit := s.explain(err)
		s.later(&s.past.pause, limit)
	}
	s.show()
}

// explain says why an attempt to listen failed, has the holder of the address looked up where
// there may be one, and returns the longest wait until the next attempt.
func (s *slot) explain(err error) time.Duration {
	t := s.trouble()
	if kind := kindOf(err); kind != t.kind { // what was found out explains another error
		t.kind, t.why, t.asked = kind, port.Reason{}, time.Time{}
	}
	switch t.kind {
	case inUse:
		s.conflict(t)
		return conflictMax
	case forbidden:
		s.fail(port.Because(port.NotPermitted, s.at().String(), forbiddenHint(s.at(), s.elsewhere())))
		t.known(s)
		if forbiddenHasHolder {
			s.findHolder()
		}
	case noAddress:
		s.fail(port.Because(port.NotOfHost, s.addr.Addr().String()))
	default:
		s.fail(port.Because(port.SystemFailed, err.Error()))
	}
	return failureMax
}

// conflict says that another socket has the address.
func (s *slot) conflict(t *trouble) {
	s.h.stats.conflicts.Add(1)
	if by := s.h.heldByUs(s); by != nil {
		t.why, t.asked = port.Reason{}, time.Time{}
		s.state, s.reason = port.Conflict, by.winner.holds(by.bound, s.winner.guest)
		return
	}
	s.state, s.reason = port.Conflict, port.Because(port.InUse, s.at().String())
	t.known(s)
	s.findHolder()
}

// known has s say what is known of the holder, if anything is.
func (t *trouble) known(s *slot) {
	if !t.why.IsZero() {
		s.state, s.reason = t.whyState, t.why
	}
}

// elsewhere returns the command by which the user gets the port at another address.
func (s *slot) elsewhere() string {
	demand, guest := "", ""
	if list := s.winner.pub.fact.Demands(); len(list) > 0 {
		demand = list[0]
	}
	if len(s.h.guests) > 1 {
		guest = s.winner.guest.name
	}
	return "run " + forwards.Elsewhere(s.winner.key.Slot(), demand, guest, s.at().Port())
}

// at returns the address that was tried last.
func (s *slot) at() netip.AddrPort { return netip.AddrPortFrom(s.addr.Addr(), s.tried) }

// number returns the port number that is tried: of any free port one that the other family of
// the port has, so that both have one number, or 0 if there is none or it could not be had.
func (s *slot) number() uint16 {
	if s.addr.Port() != 0 || s.failed {
		return s.addr.Port()
	}
	p := s.winner.pub
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

// later plans the next attempt after a pause, which is limit at most.
func (s *slot) later(pause *schedule.Backoff, limit time.Duration) {
	pause.Max = limit
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

// network returns a protocol with the family of an address: a :: listener takes IPv6 only.
func network(p port.Protocol, at netip.AddrPort) string {
	if at.Addr().Is4() {
		return p.String() + "4"
	}
	return p.String() + "6"
}

func (s *slot) listen(ctx context.Context) error {
	if s.h.taken != nil && s.at().Port() != 0 && s.h.taken(Socket{s.protocol, s.at()}) {
		return errTaken
	}
	name := network(s.protocol, s.addr)
	if s.protocol == port.UDP {
		pc, err := s.h.opt.Network.ListenPacket(ctx, name, s.at().String())
		if err != nil {
			return err
		}
		p := newUDPPort(&s.door, pc)
		s.listener, s.bound = p, addrOf(pc.LocalAddr(), s.at())
		s.h.wg.Go(func() { p.run(ctx) })
		return nil
	}
	ln, err := s.h.opt.Network.Listen(ctx, name, s.at().String())
	if err != nil {
		return err
	}
	s.listener, s.bound = s.accept(ctx, ln), addrOf(ln.Addr(), s.at())
	return nil
}

// accept serves the connections of a TCP listener until that is closed, by closing what
// accept returns.
func (s *slot) accept(ctx context.Context, ln net.Listener) io.Closer {
	d := &s.door
	carry := func(conn net.Conn) { d.carry(ctx, conn) }
	died := func(listener io.Closer, err error) {
		defer d.h.lock().unlock()
		s.died(listener, fmt.Errorf("accept: %w", err))
	}
	return s.h.acceptor.Start(ctx, ln, s.h.wg.Go, carry, died)
}

// show reports the slot's state for its winner, and for the claims that the winner
// serves as well at the addresses that they ask for.
func (s *slot) show() {
	addr := s.at()
	if s.listener != nil {
		addr = s.bound
	}
	s.winner.set(s.state, addr, s.reason)
	for _, c := range s.shared {
		c.set(s.state, c.addr, s.reason)
	}
}

// close stops listening; flows that run go on.
func (s *slot) close() {
	if s.closed.Swap(true) {
		return
	}
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
	s.listener = nil
	s.h.stats.listeners.Add(-1)
}

// died handles a listener that failed by itself.
func (s *slot) died(listener io.Closer, err error) {
	if s.closed.Load() || s.listener != listener || s.h.ctx.Err() != nil {
		return
	}
	s.shut()
	s.fail(port.Because(port.SystemFailed, err.Error()))
	s.failed = true
	pause := &s.trouble().pause
	pause.Reset()
	s.later(pause, failureMax)
	s.show()
}

// heldByUs returns the slot of ours that holds the address of s, if any. It can only
// be one of any free port that was given the port that s wants.
func (h *locked) heldByUs(s *slot) *slot {
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
