// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/replica"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/wire"
)

const (
	dialTimeout     = 30 * time.Second // one attempt at a session, handshake included
	snapshotTimeout = 30 * time.Second // from a session to its first snapshot
	stableAfter     = 10 * time.Second // the next attempt after a session this long is prompt

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

	// Guarded by h.mu.
	pubs       map[port.Key]*publication
	text       int // bytes of names and labels in pubs
	generation uint64
	admitted   int                     // claims that count against the limit
	waiting    []*claim                // for the limit, in order; those that are gone are skipped
	others     map[port.Key]*port.Fact // unpublished ports
	unread     []wire.Unread           // NAT rules that the guest does not understand, sorted
	omitted    int                     // unpublished ports that the guest has not sent
	graceEnd   time.Time
	sender     link.Peer // who sent pubs
	keptEnd    time.Time // when what is kept is withdrawn, zero if nothing is
	connected  bool
	away       bool // it was connected, and is not any more
	peer       link.Peer
	err        string
	code       string // of err, see codeOf
	remote     bool
	since      time.Time

	limits limits

	// flows and kept have their own locks: traffic does not wait for listen(2). kept changes
	// under h.mu.
	flows *flows
	kept  *kept
}

func newGuest(h *Host, g Guest) *guest {
	err := "not tried yet"
	if g.Dials {
		err = "not connected yet"
	}
	return &guest{
		h: h, name: g.Name, dial: g.Dial, dials: g.Dials, log: h.opt.Logger.With("guest", g.Name),
		pubs:   make(map[port.Key]*publication),
		others: make(map[port.Key]*port.Fact),
		since:  time.Now(),
		err:    err,
		limits: newLimits(),
		flows:  newFlows(h.opt.MaxFlows),
		kept:   newKept(),
	}
}

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

// describe returns the status. h.mu is held.
func (g *guest) describe() GuestStatus {
	return GuestStatus{
		Name: g.name, Connected: g.connected, Peer: g.peer, Error: g.err, Code: g.code, Remote: g.remote, Since: g.since,
		Generation: g.generation, Publications: len(g.pubs), Flows: g.flows.Len(),
		Unread: g.unread, Omitted: g.omitted,
	}
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

// replacedMax is the longest pause of a host whose guest another host took over.
// If both came back soon, each would reset the flows of the other again and again.
const replacedMax = 5 * time.Minute

// replacedError says that another host took over, and what follows.
func replacedError(pause time.Duration, dials bool) error {
	then := "waiting until it dials again"
	if !dials {
		then = "retrying in " + pause.Round(time.Second).String()
	}
	return fmt.Errorf("another host took over this guest, which serves one host at a time; %s", then)
}

// replaced reports whether a session ended because another host took over.
func replaced(err error) bool {
	var closed *link.CloseError
	return errors.As(err, &closed) && closed.Remote && closed.Reason == link.ReasonReplaced
}

// Codes of why there is no session, beside those of link.Refusal.
const (
	CodeReplaced   = "replaced"   // another host took over
	CodeTokenFile  = "token-file" // our token cannot be read
	CodePermission = "permission" // we may not open the link's socket
	CodeNoMachine  = "no-machine" // no machine has the CID of the link
)

// codeOf returns the code of why there is no session, empty if it has none, and whether
// the guest refused us.
func codeOf(err error) (code string, remote bool) {
	var refused *link.RefusedError
	switch {
	case replaced(err):
		return CodeReplaced, true
	case errors.As(err, &refused) && refused.Code == link.RefusedToken && refused.Err != nil:
		return CodeTokenFile, false
	case errors.As(err, &refused):
		return string(refused.Code), refused.Remote
	case errors.Is(err, fs.ErrPermission):
		return CodePermission, false
	case errors.Is(err, syscall.ENODEV):
		return CodeNoMachine, false
	}
	return "", false
}

// servedMax is the longest pause after a session in which the guest served: it is
// most likely back at once. Only after many brief sessions in a row are pauses longer.
const servedMax = 500 * time.Millisecond

const (
	briefSession  = 250 * time.Millisecond // a shorter session is of no use to anybody
	briefSessions = 10                     // in a row, before the pauses grow beyond servedMax
)

// pauses are those between the sessions of a guest.
type pauses struct {
	failed, served, brief, replaced schedule.Backoff

	briefs int // brief sessions in a row, up to briefSessions
}

// newPauses returns those of a guest. One that dials decides by itself when it comes back, so
// the host waits only for what is taken over in a loop.
func newPauses(o Options, dials bool) *pauses {
	p := &pauses{
		failed:   schedule.Backoff{Min: o.BackoffMin, Max: o.BackoffMax, Jitter: 0.25},
		served:   schedule.Backoff{Min: o.BackoffMin, Max: max(o.BackoffMin, min(servedMax, o.BackoffMax)), Jitter: 0.25},
		brief:    schedule.Backoff{Min: max(o.BackoffMin, 2*servedMax), Max: max(o.BackoffMin, o.BackoffMax), Jitter: 0.25},
		replaced: schedule.Backoff{Min: o.BackoffMax, Max: max(replacedMax, o.BackoffMax), Jitter: 0.25},
	}
	if dials {
		p.replaced = p.served
	}
	return p
}

// next returns the pause after a session, or the attempt at one, ended with err.
// A guest served if a snapshot of it was applied.
func (p *pauses) next(err error, lasted time.Duration, served bool) time.Duration {
	if lasted >= 2*replacedMax {
		p.replaced.Reset()
	}
	if replaced(err) {
		return p.replaced.Next()
	}
	if lasted >= stableAfter {
		p.failed.Reset()
		p.served.Reset()
	}
	if lasted >= briefSession {
		p.briefs = 0
		p.brief.Reset()
	}
	if !served || errors.Is(err, errProtocol) {
		return p.failed.Next()
	}
	p.failed.Reset()
	if lasted < briefSession {
		if p.briefs == briefSessions {
			return p.brief.Next()
		}
		p.briefs++
	}
	return p.served.Next()
}

// lost notes why there is no session; it logs a transition or a new reason only.
func (g *guest) lost(err error, code string, remote bool) {
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	was, text := g.connected, err.Error()
	if !was && g.err == text {
		return
	}
	g.connected, g.err, g.code, g.remote, g.since = false, text, code, remote, time.Now()
	if was {
		g.setAway(true)
		g.h.publish()
		g.log.Warn("connection to the guest lost; retrying", "err", err)
	} else {
		g.log.Warn("guest unreachable; retrying", "err", err)
	}
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

	g.h.mu.Lock()
	g.peer = session.Peer()
	g.h.mu.Unlock()

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
	g.h.mu.Lock()
	if len(g.pubs)+len(g.others) > 0 && g.graceEnd.IsZero() {
		g.graceEnd = time.Now().Add(g.h.opt.Grace)
		g.h.timers.Notify()
	}
	served = g.connected
	g.h.mu.Unlock()
	return time.Since(began), served, err
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
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	g.graceEnd = time.Time{}
	g.connected, g.err, g.code, g.remote, g.since = true, "", "", false, time.Now()
	g.log.Info("guest connected", "address", g.peer.Address, "name", g.peer.Name,
		"version", g.peer.Version, "proof", g.peer.Proof, "publications", len(g.pubs))
}

// applyWanted makes the guest's publications what a step says. Those that are equal
// already are left alone, with their listeners.
func (g *guest) applyWanted(ctx context.Context, s replica.Step[port.Key, port.Fact]) error {
	h := g.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	incomplete := len(s.Partial) > 0
	for _, k := range g.gone(s) {
		if s.Whole && incomplete && g.keeps(k) {
			g.keep(k)
		} else {
			g.remove(k)
		}
	}
	for _, p := range s.Put {
		g.put(p)
	}
	if !incomplete {
		g.removeKept("it has read all of its sources")
	}
	g.sender = g.peer
	if n := g.kept.len(); n > 0 && !g.connected {
		g.log.Info("keeping ports that the guest published before", "until", "it has read all of its sources",
			"sources", s.Partial, "publications", n, "for", time.Until(g.keptEnd).Round(time.Second))
	}
	g.graceEnd = time.Time{}
	g.setAway(false)
	count := &h.stats.changes
	if s.Whole {
		count = &h.stats.snapshots
	}
	count.Add(1)
	g.generation = s.Generation
	g.limitKept()
	h.commit(ctx)
	if g.overLimit() {
		return fmt.Errorf("%w: more than %d publications, or than %d bytes of names and labels",
			errProtocol, wire.MaxPublications, wire.MaxSetBytes)
	}
	return nil
}

// gone returns the keys that a step ends. h.mu is held.
func (g *guest) gone(s replica.Step[port.Key, port.Fact]) []port.Key {
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

func (g *guest) overLimit() bool {
	return len(g.pubs) > wire.MaxPublications || g.text > wire.MaxSetBytes
}

// put adds or replaces one publication. h.mu is held.
func (g *guest) put(p port.Fact) {
	pub := g.pubs[p.Key]
	if pub == nil {
		pub = &publication{guest: g, Key: p.Key, fact: new(port.Fact), since: time.Now()}
		g.pubs[p.Key] = pub
	}
	if old := pub.fact; !old.Equal(p) {
		g.h.changed[pub] = struct{}{}
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
// h.mu is held.
func (g *guest) decide(pub *publication) {
	g.decideRow(pub)
	if len(g.h.moved) == 0 {
		return
	}
	if o := pub.otherFamily(); o != nil {
		g.decideRow(o)
	}
}

// decideRow makes the claims of pub those that the policy allows. Claims that remain
// are kept. h.mu is held.
func (g *guest) decideRow(pub *publication) {
	h := g.h
	d := h.policy.Host(g.name, port.Publication{Fact: *pub.fact}, slices.Clone(pub.fact.Decision.Host))
	if d.Allow {
		if pub.onConflict != d.OnConflict {
			pub.onConflict = d.OnConflict
			h.changed[pub] = struct{}{} // a conflict that it has may be moved now
		}
		pub.remember(d.Host)
	}
	wasExposed := !pub.exposed.IsZero()
	var exposed time.Time
	if d.Exposed != nil {
		exposed = *d.Exposed
	}
	if !pub.exposed.Equal(exposed) {
		pub.exposed = exposed
		defer pub.describe()
	}
	var addrs []netip.AddrPort
	for _, a := range d.Host {
		a = netip.AddrPortFrom(a.Addr().Unmap(), pub.portFor(a.Port()))
		if d.Allow && a.Addr().IsValid() && !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	old := pub.claims
	pub.claims = nil
	isNew := false
	for _, a := range addrs {
		if i := slices.IndexFunc(old, func(c *claim) bool { return c.addr == a && c.isOf(pub) }); i >= 0 {
			pub.claims = append(pub.claims, old[i])
			old = slices.Delete(slices.Clone(old), i, i+1)
			continue
		}
		isNew = true
		c := &claim{guest: g, key: pub.Key, addr: a, pub: pub}
		if pub.fact.Source == port.SourceDemand {
			c.names = pub.fact.Demands()
		}
		c.outcome = port.Outcome{State: port.Pending, HostAddress: a, Since: time.Now()}
		pub.claims = append(pub.claims, c)
		g.waiting = append(g.waiting, c)
	}
	for _, c := range old {
		g.release(c)
		if wasExposed && !c.addr.Addr().IsLoopback() {
			g.flows.ResetOutside(errHidden, pub.Key)
		}
	}
	if isNew || len(old) > 0 {
		h.changed[pub] = struct{}{}
	}
	if len(addrs) > 0 {
		pub.denied = nil
		return
	}
	reason := d.Reason
	if reason.IsZero() {
		reason = d.Rule.Because(port.NoHostAddress)
	}
	if pub.denied == nil || pub.denied.Reason != reason {
		h.changed[pub] = struct{}{}
		pub.denied = &port.Outcome{State: port.Denied, Reason: reason, Since: time.Now()}
		if d.Pending() {
			pub.denied.State = port.Pending
		}
	}
	if !d.Pending() {
		g.flows.Reset(errDenied, pub.Key)
	}
}

// release ends a claim. h.mu is held.
func (g *guest) release(c *claim) {
	if c.admitted {
		g.admitted--
	}
	g.h.leave(c)
}

// remove withdraws one publication. h.mu is held.
func (g *guest) remove(k port.Key) {
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

// withdraw removes all publications. h.mu is held; the caller commits.
func (g *guest) withdraw() {
	for k := range g.pubs {
		g.remove(k)
	}
	g.dropUnpublished()
}

// setAway notes whether the guest's ports lead nowhere at present. h.mu is held.
func (g *guest) setAway(away bool) {
	if g.away == away {
		return
	}
	g.away = away
	for _, p := range g.pubs {
		g.h.changed[p] = struct{}{}
	}
}

// reconsider applies a new policy. h.mu is held; the caller commits.
func (g *guest) reconsider() {
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

// admit admits waiting claims, in order, up to the limit. h.mu is held.
func (g *guest) admit(ctx context.Context) {
	limit := g.h.opt.MaxListeners
	for len(g.waiting) > 0 && (g.waiting[0].gone.Load() || g.admitted < limit) {
		c := g.waiting[0]
		g.waiting = g.waiting[1:]
		if !c.gone.Load() {
			g.admitted++
			g.h.join(ctx, c)
		}
	}
	g.waiting = slices.DeleteFunc(g.waiting, func(c *claim) bool { return c.gone.Load() })
	if len(g.waiting) == 0 {
		g.waiting = nil
		return
	}
	reason := port.Because(port.TooManyListeners, strconv.Itoa(limit))
	for _, c := range g.waiting {
		c.set(port.Failed, c.addr, reason)
	}
}

// forGuest is what a guest is told: not which port of another guest has an address.
func forGuest(r port.Reason) port.Reason {
	if r.Code() == port.HeldByRival {
		return port.Because(port.HeldElsewhere, r.Args()[0])
	}
	return r
}
