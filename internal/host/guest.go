// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/replica"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	dialTimeout     = 30 * time.Second // one attempt at a session, handshake included
	snapshotTimeout = 30 * time.Second // from a session to its first snapshot

	// What one guest may send a second, and at once: control messages, the
	// rows that they name, and bytes. A guest whose changes wait collects
	// them in one message. The largest set is read in half of snapshotTimeout,
	// whatever was sent before.
	messageRate, messageBurst = 500, 1000
	itemRate, itemBurst       = wire.MaxPublications / 15, 2 * wire.MaxPublications
	byteRate, byteBurst       = wire.MaxSetBytes / 15, 2 * wire.MaxSetBytes

	// Other ports that are tried for the conflicts of one guest a second, and at once. Without
	// this a message could have the host try maxTries ports for each publication in it.
	moveRate, moveBurst = 500, 1 << 16
)

// guest is one guest, over all its sessions.
type guest struct {
	h     *Host
	name  string
	dial  func(context.Context) (link.Session, error)
	dials bool // the guest dials: dial waits for it, as long as it takes
	log   *slog.Logger

	limits limits
	flows  *flows

	state lockedGuest // see lock
}

// lockedGuest is a guest while the lock of its Host is held.
type lockedGuest struct {
	*guest
	h      *locked
	status GuestStatus // without its counts

	// What the guest said.
	pubs   map[port.Key]*publication
	text   int                     // bytes of names and labels in pubs
	sender link.Peer               // who sent pubs
	away   bool                    // it was connected, and is not any more
	others map[port.Key]*port.Fact // unpublished ports

	// Claims and the limit; see admit.
	wanted   int       // claims that there are
	arrived  []*claim  // since the last admission; some may be gone
	unshared bool      // claims, or their owners, changed since
	short    bool      // there were more claims than the limit
	rested   time.Time // when so many are ranked again

	graceEnd time.Time // when pubs and others are withdrawn, zero while they are not
	kept     int       // publications that are kept
	keptEnd  time.Time // when they are withdrawn, zero if there are none
}

func newGuest(h *Host, o Guest) *guest {
	g := &guest{
		h: h, name: o.Name, dial: o.Dial, dials: o.Dials, log: h.opt.Logger.With("guest", o.Name),
		limits: newLimits(),
		flows:  newFlows(h.opt.MaxFlows),
	}
	g.state = lockedGuest{
		guest: g, h: &h.state,
		status: GuestStatus{Name: o.Name, Error: "not tried yet", Since: time.Now()},
		pubs:   make(map[port.Key]*publication),
		others: make(map[port.Key]*port.Fact),
	}
	if o.Dials {
		g.state.status.Error = "not connected yet"
	}
	return g
}

// lock begins a step, which ends with unlock.
func (g *guest) lock() *lockedGuest {
	g.h.lock()
	return &g.state
}

// lockToOpen is lock for a step that may open ports.
func (g *guest) lockToOpen() *lockedGuest {
	g.h.lockToOpen()
	return &g.state
}

func (g *lockedGuest) unlock() { g.h.unlock() }

// limits bound what one guest costs, over all its sessions: it could begin a new one
// at any time.
type limits struct{ messages, items, bytes, moves *rate.Limiter }

func newLimits() limits {
	return limits{
		rate.NewLimiter(messageRate, messageBurst), rate.NewLimiter(itemRate, itemBurst), rate.NewLimiter(byteRate, byteBurst),
		rate.NewLimiter(moveRate, moveBurst),
	}
}

// wait waits until the guest may have sent a message of so many rows and bytes.
func (l *limits) wait(ctx context.Context, items, bytes int) error {
	err := l.messages.Wait(ctx)
	if err == nil {
		err = l.items.WaitN(ctx, min(items, l.items.Burst()))
	}
	if err == nil {
		err = l.bytes.WaitN(ctx, min(bytes, l.bytes.Burst()))
	}
	return err
}

// run keeps a session to the guest until ctx ends.
func (g *guest) run(ctx context.Context) {
	p := newPauses(g.h.opt, g.dials)
	for ctx.Err() == nil {
		lasted, served, err := g.session(ctx)
		if ctx.Err() != nil {
			return
		}
		pause := p.next(err, lasted, served)
		code, remote := codeOf(err)
		if replaced(err) {
			err = replacedError(pause, g.dials)
		}
		g.lost(err, code, remote)
		_ = schedule.Sleep(ctx, pause)
	}
}

// lost notes why there is no session; it logs a transition or a new reason only.
func (g *guest) lost(err error, code string, remote bool) {
	l := g.lock()
	defer l.unlock()
	was, text := l.status.Connected, err.Error()
	if !was && l.status.Error == text {
		return
	}
	l.note(false, text, code, remote)
	if was {
		l.setAway(true)
		g.log.Warn("connection to the guest lost; retrying", "err", err)
	} else {
		g.log.Warn("guest unreachable; retrying", "err", err)
	}
}

// note notes whether there is a session, and why not.
func (g *lockedGuest) note(connected bool, err, code string, remote bool) {
	s := &g.status
	s.Connected, s.Error, s.Code, s.Remote, s.Since = connected, err, code, remote, time.Now()
}

// session makes one session and returns how long it lasted, without the attempt to
// make it, whether a snapshot was applied, and why it ended.
func (g *guest) session(ctx context.Context) (lasted time.Duration, served bool, err error) {
	session, err := g.connect(ctx)
	if err != nil {
		return 0, false, err
	}
	began := time.Now()
	stop := context.AfterFunc(ctx, func() { _ = session.Close() })
	defer stop()

	l := g.lock()
	l.status.Peer = session.Peer()
	l.unlock()

	err = g.exchange(ctx, session)
	switch {
	case errors.Is(err, errProtocol):
		_ = session.CloseWith(link.ReasonProtocol)
	case errors.Is(err, replica.ErrSilent):
		_ = session.CloseWith(link.ReasonSilent)
	default:
		_ = session.Close()
	}
	g.flows.use(nil)
	return time.Since(began), g.parted(), err
}

// parted begins the grace period after a session, and reports whether a snapshot was applied
// in it.
func (g *guest) parted() (served bool) {
	l := g.lock()
	defer l.unlock()
	if len(l.pubs)+len(l.others) > 0 && l.graceEnd.IsZero() {
		l.graceEnd = time.Now().Add(g.h.opt.Grace)
		g.h.timers.Notify()
	}
	return l.status.Connected
}

// connect makes a session, or waits for one.
func (g *guest) connect(ctx context.Context) (link.Session, error) {
	if !g.dials {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, dialTimeout)
		defer cancel()
	}
	return g.dial(ctx)
}

// errProtocol marks errors that a correct agent never causes.
var errProtocol = replica.ErrProtocol

var errNoSnapshot = errors.New("no snapshot")

// exchange keeps the tables of a session until it ends.
func (g *guest) exchange(ctx context.Context, session link.Session) error {
	sctx, cancel := context.WithCancelCause(ctx) // listeners outlive it
	defer cancel(nil)
	first := time.AfterFunc(snapshotTimeout, func() { cancel(errNoSnapshot) })
	defer first.Stop()
	s := replica.New(session.Control(), replica.Options{Wait: g.limits.wait, Fault: g.dropped})
	up := false
	replica.Receive(s, replica.Wanted(), func(step replica.Step[port.Key, port.Fact]) error {
		if err := g.applyWanted(ctx, step); err != nil || up {
			return err
		}
		up = first.Stop()
		g.linked(session)
		return nil
	})
	replica.Receive(s, replica.Unpublished(), func(step replica.Step[port.Key, port.Fact]) error {
		return g.applyUnpublished(ctx, step)
	})
	replica.Receive(s, replica.Unread(), g.applyUnread)
	replica.Send(s, replica.Outcomes(), replica.From[port.Key, port.Answer, ID, Row]{
		Table: g.h.table, Only: func(r Row) bool { return r.Guest == g.name && !r.Lost },
		Key: func(id ID) port.Key { return id.Key }, Row: answer,
	})
	err := s.Run(sctx)
	if serr := session.Err(); serr != nil && !errors.Is(err, errProtocol) {
		return serr
	}
	if !up && !errors.Is(err, errNoSnapshot) {
		return fmt.Errorf("%w: %w", errNoSnapshot, err)
	}
	return err
}

// answer is what a guest is told of a publication.
func answer(r Row) port.Answer {
	outcomes := slices.Clone(r.Outcomes)
	for i := range outcomes {
		outcomes[i].Reason = forGuest(outcomes[i].Reason)
	}
	return port.NewAnswer(r.Key, outcomes)
}

// dropped notes that a message of the guest was not applied, so that all tables are asked for.
func (g *guest) dropped(err error) {
	g.h.stats.resyncs.Add(1)
	g.log.Info("requesting a snapshot from the guest", "reason", err)
}

// linked notes that the guest is connected: flows may run.
func (g *guest) linked(session link.Session) {
	g.flows.use(session)
	l := g.lock()
	defer l.unlock()
	l.graceEnd = time.Time{}
	l.note(true, "", "", false)
	p := l.status.Peer
	g.log.Info("guest connected", "address", p.Address, "name", p.Name,
		"version", p.Version, "proof", p.Proof, "publications", len(l.pubs))
}

// applyWanted makes the guest's publications what a step says. Those that are equal
// already are left alone, with their listeners.
func (g *guest) applyWanted(ctx context.Context, s replica.Step[port.Key, port.Fact]) error {
	l := g.lockToOpen()
	defer l.unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	l.apply(s)
	if l.overLimit() {
		return fmt.Errorf("%w: more than %d publications, or than %d bytes of names and labels",
			errProtocol, wire.MaxPublications, wire.MaxSetBytes)
	}
	return nil
}

func (g *lockedGuest) apply(s replica.Step[port.Key, port.Fact]) {
	incomplete := len(s.Partial) > 0
	gone := g.gone(s)
	if s.Whole && incomplete {
		gone = slices.DeleteFunc(gone, g.keep) // first, so that the time of those that are kept goes on
	}
	for _, k := range gone {
		g.remove(k)
	}
	for _, p := range s.Put {
		g.put(p)
	}
	if !incomplete {
		g.removeKept("it has read all of its sources")
	}
	g.sender = g.status.Peer
	if g.kept > 0 && !g.status.Connected {
		g.log.Info("keeping ports that the guest published before", "until", "it has read all of its sources",
			"sources", s.Partial, "publications", g.kept, "for", time.Until(g.keptEnd).Round(time.Second))
	}
	g.graceEnd = time.Time{}
	g.setAway(false)
	count := &g.h.stats.changes
	if s.Whole {
		count = &g.h.stats.snapshots
	}
	count.Add(1)
	g.status.Generation = s.Generation
	g.limitKept()
}

// gone returns the keys that a step ends.
func (g *lockedGuest) gone(s replica.Step[port.Key, port.Fact]) []port.Key {
	if !s.Whole {
		return s.Removed
	}
	named := make(map[port.Key]struct{}, len(s.Put))
	for _, p := range s.Put {
		named[p.Key] = struct{}{}
	}
	var gone []port.Key
	for k := range g.pubs {
		if _, ok := named[k]; !ok {
			gone = append(gone, k)
		}
	}
	return gone
}

func (g *lockedGuest) overLimit() bool {
	return len(g.pubs) > wire.MaxPublications || g.text > wire.MaxSetBytes
}

// put adds or replaces one publication.
func (g *lockedGuest) put(p port.Fact) {
	pub := g.pubs[p.Key]
	if pub == nil {
		pub = &publication{guest: g, Key: p.Key, fact: new(port.Fact), since: time.Now()}
		g.pubs[p.Key] = pub
	}
	if old := pub.fact; !old.Equal(p) {
		g.h.changed[pub] = struct{}{}
		g.unshared = true
		g.text += p.TextBytes() - old.TextBytes()
		fact := p // not a part of the step, which is not kept
		pub.fact = &fact
		if !old.Owner.Same(p.Owner) || old.Target != p.Target || old.Decision.Yields != p.Decision.Yields ||
			(len(old.Demands()) > 0) != (len(p.Demands()) > 0) {
			g.h.touch(pub)
		}
	}
	pub.tries = 0
	g.decide(pub)
	g.unkeep(pub) // now that connections which waited are told of the decision
}

// decide decides about pub, and anew about the other family of its port, which moves with it.
func (g *lockedGuest) decide(pub *publication) {
	g.decideRow(pub)
	if len(g.h.moved) == 0 {
		return
	}
	if o := pub.otherFamily(); o != nil {
		g.decideRow(o)
	}
}

// decideRow makes the claims of pub those that the policy allows. Claims that remain
// are kept.
func (g *lockedGuest) decideRow(pub *publication) {
	d := g.h.policy.Host(g.name, port.Publication{Fact: *pub.fact}, slices.Clone(pub.fact.Decision.Host))
	if d.Allow {
		if pub.onConflict != d.OnConflict {
			pub.onConflict = d.OnConflict
			g.h.changed[pub] = struct{}{} // a conflict that it has may be moved now
			g.h.touch(pub)                // or says that it does not move
		}
		pub.remember(d.Host)
	}
	g.change(pub, plan(pub.claims, pub.fact.Demands(), !pub.exposed.IsZero(), pub.wanted(d.Decision), d.Decision))
	var until time.Time
	if d.Exposed != nil {
		until = *d.Exposed
	}
	if !pub.exposed.Equal(until) {
		pub.exposed = until
		pub.describe()
	}
}

// change makes a difference to pub.
func (g *lockedGuest) change(pub *publication, d diff) {
	pub.claims = nil
	for _, p := range d.claims {
		c := p.stays
		if c == nil {
			c = newClaim(pub, p.addr)
			g.arrived = append(g.arrived, c)
			g.wanted++
			g.unshared = true
			g.h.changed[pub] = struct{}{}
		}
		pub.claims = append(pub.claims, c)
	}
	for _, c := range d.ended {
		g.release(c)
		g.h.changed[pub] = struct{}{}
	}
	if d.hide {
		g.flows.ResetOutside(errHidden, pub.Key)
	}
	pub.deny(d.denied, d.pending)
	if pub.denied != nil && !d.pending {
		g.flows.Reset(errDenied, pub.Key)
	}
}

// release ends a claim.
func (g *lockedGuest) release(c *claim) {
	if c.gone.Swap(true) {
		return
	}
	g.wanted--
	g.unshared = true
	g.expel(c)
}

// expel takes from a claim what it has.
func (g *lockedGuest) expel(c *claim) {
	if !c.admitted {
		return
	}
	c.admitted = false
	if c.slot != nil {
		c.slot.close()
		c.slot = nil
		return
	}
	in := g.h.groups[c.group()]
	in.drop(c)
	g.h.touched[in] = struct{}{}
}

// remove withdraws one publication.
func (g *lockedGuest) remove(k port.Key) {
	pub := g.pubs[k]
	if pub == nil {
		return
	}
	for _, c := range pub.claims {
		g.release(c)
	}
	g.unkeep(pub)
	g.text -= pub.fact.TextBytes()
	delete(g.pubs, k)
	g.h.changed[pub] = struct{}{}
}

// withdraw removes all publications.
func (g *lockedGuest) withdraw() {
	for k := range g.pubs {
		g.remove(k)
	}
	g.dropUnpublished()
}

// setAway notes whether the guest's ports lead nowhere at present.
func (g *lockedGuest) setAway(away bool) {
	if g.away == away {
		return
	}
	g.away = away
	for _, p := range g.pubs {
		g.h.changed[p] = struct{}{}
	}
}

// reconsider applies a new policy.
func (g *lockedGuest) reconsider() {
	for _, p := range g.pubs {
		p.tries = 0
		g.decide(p)
	}
	// The end of an exposure finds no publication if that was withdrawn before.
	g.flows.ResetExposed(errHidden, func(k port.Key) bool {
		p := g.pubs[k]
		return p != nil && !p.exposed.IsZero()
	})
}

// forGuest is what a guest is told: not which port of another guest has an address.
func forGuest(r port.Reason) port.Reason {
	if r.Code() == port.HeldByRival {
		return port.Because(port.HeldElsewhere, r.Args()[0])
	}
	return r
}
