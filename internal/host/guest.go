// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/wire"
)

const (
	dialTimeout     = 30 * time.Second // one attempt at a session, handshake included
	snapshotTimeout = 30 * time.Second // from a session to its first snapshot
	controlTimeout  = 10 * time.Second // for the guest to take a control message
	stableAfter     = 10 * time.Second // the next attempt after a session this long is prompt
	maxMalformed    = 3                // messages in a row

	// What one guest may send a second, and at once: control messages, the
	// publications that they name, and bytes. A guest whose changes wait collects
	// them in one message.
	messageRate, messageBurst = 500, 1000
	itemRate, itemBurst       = 4000, 2 * wire.MaxPublications
	byteRate, byteBurst       = 2 << 20, 2 * wire.MaxSetBytes

	// Other ports that are tried for the conflicts of one guest a second, and at once. Without
	// this a message could have the host try maxTries ports for each publication in it.
	moveRate, moveBurst = 500, 1 << 16

	maxMalformedSession = 30 // messages in all
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
	admitted   int      // claims that count against the limit
	waiting    []*claim // for the limit, in order; those that are gone are skipped
	dirty      map[port.Key]struct{}
	others     map[port.Key]wire.UnpublishedPort // unpublished ports
	stale      map[port.Key]wire.UnpublishedPort // of others, what a message has not named yet; nil between messages
	unread     []wire.Unread                     // NAT rules that the guest does not understand
	omitted    int                               // unpublished ports that the guest has not sent
	ack        bool                              // generation is to be acknowledged
	resync     string                            // why a snapshot is to be requested, empty if it is not
	graceEnd   time.Time
	sender     link.Peer // who sent pubs
	incomplete bool      // its last snapshot was
	keptEnd    time.Time // when what is kept is withdrawn, zero if nothing is
	connected  bool
	away       bool // it was connected, and is not any more
	peer       link.Peer
	err        string
	code       string // of err, see codeOf
	remote     bool
	since      time.Time

	writer schedule.Signal // there is something to write
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
		others: make(map[port.Key]wire.UnpublishedPort),
		dirty:  make(map[port.Key]struct{}),
		since:  time.Now(),
		err:    err,
		writer: schedule.NewSignal(),
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

// wait waits until the guest may have sent a message of so many items and bytes.
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

// itemsIn returns how many publications a message names.
func itemsIn(c wire.Control) (n int) {
	if c.Snapshot != nil {
		n += len(c.Snapshot.Publications)
	}
	if c.Change != nil {
		n += len(c.Change.Put) + len(c.Change.Removed)
	}
	if u := c.Unpublished; u != nil {
		n += len(u.Put) + len(u.Removed)
	}
	return n
}

// counter counts the bytes that are read.
type counter struct {
	io.Reader
	n int
}

func (c *counter) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.n += n
	return n, err
}

// take returns the count and begins again.
func (c *counter) take() int {
	n := c.n
	c.n = 0
	return n
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
	g.peer, g.ack, g.resync = session.Peer(), false, ""
	clear(g.dirty)
	g.h.mu.Unlock()

	wctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { g.write(wctx, session) })
	if serve := g.h.opt.Runs; serve != nil {
		wg.Go(func() { serve(wctx, g.name, session) })
	}
	err = g.read(ctx, session)
	if errors.Is(err, errProtocol) {
		_ = session.CloseWith(link.ReasonProtocol)
	} else {
		_ = session.Close()
	}
	cancel()
	wg.Wait()
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
var errProtocol = errors.New("protocol violated")

// read applies the guest's messages until the session ends.
func (g *guest) read(ctx context.Context, session link.Session) error {
	control := session.Control()
	_ = control.SetReadDeadline(time.Now().Add(snapshotTimeout))
	count := &counter{Reader: control}
	r := bufio.NewReader(count)
	var join wire.Joiner
	var synced, up bool // a generation of this session is applied; and once was
	bad, allBad := 0, 0
	for {
		c, err := wire.ReadControl(r)
		if err := g.limits.wait(ctx, itemsIn(c), count.take()); err != nil {
			return err
		}
		whole := false
		if err == nil {
			c, whole, err = join.Add(c)
		}
		switch {
		case errors.Is(err, wire.ErrMalformed):
			bad, allBad = bad+1, allBad+1
			if bad >= maxMalformed || allBad >= maxMalformedSession {
				return fmt.Errorf("%w: %w", errProtocol, err)
			}
			join, synced = wire.Joiner{}, false
			g.wantSnapshot(err.Error())
			continue
		case err != nil:
			if serr := session.Err(); serr != nil {
				return serr
			}
			if !up {
				return fmt.Errorf("no snapshot: %w", err)
			}
			return err
		case !whole:
			continue
		}
		switch {
		case c.Snapshot != nil:
			if err := g.applySnapshot(ctx, c.Snapshot); err != nil {
				return err
			}
			synced, bad = true, 0
			if !up {
				up = true
				_ = control.SetReadDeadline(time.Time{})
				g.linked(session)
				if !session.Peer().Unpublished { // an agent that reports none; the host has those of another one
					g.forgetUnpublished()
				}
			}
		case c.Change != nil && synced:
			ok, err := g.applyChange(ctx, c.Change)
			if err != nil {
				return err
			}
			synced = ok
			if ok {
				bad = 0
			}
		case c.Unpublished != nil:
			g.applyUnpublished(ctx, c.Unpublished)
		}
		// Changes before the requested snapshot have a base that is missing here.
		// Agents send nothing else.
	}
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

func (g *guest) wantSnapshot(reason string) {
	g.h.stats.resyncs.Add(1)
	g.log.Info("requesting a snapshot from the guest", "reason", reason)
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	g.resync, g.ack = reason, false
	g.writer.Notify()
}

// applySnapshot makes the guest's publications equal to s. Those that are equal
// already are left alone, with their listeners.
func (g *guest) applySnapshot(ctx context.Context, s *wire.Snapshot) error {
	h := g.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	named := make(map[port.Key]struct{}, len(s.Publications))
	for _, p := range s.Publications {
		named[p.Key] = struct{}{}
	}
	for k := range g.pubs {
		switch _, ok := named[k]; {
		case ok:
		case g.keeps(s, k):
			g.keep(k)
		default:
			g.remove(k)
		}
	}
	for _, p := range s.Publications {
		g.put(p)
	}
	g.sender, g.incomplete = g.peer, len(s.Incomplete) > 0
	if n := g.kept.len(); n > 0 && !g.connected {
		g.log.Info("keeping ports that the guest published before", "until", "it has read all of its sources",
			"sources", []string(s.Incomplete), "publications", n, "for", time.Until(g.keptEnd).Round(time.Second))
	}
	g.graceEnd = time.Time{}
	g.setAway(false)
	return g.applied(ctx, s.Generation, &h.stats.snapshots)
}

// applyChange applies c if its base is current, and requests a snapshot otherwise.
func (g *guest) applyChange(ctx context.Context, c *wire.Change) (ok bool, err error) {
	h := g.h
	h.mu.Lock()
	if c.Base != g.generation {
		at := g.generation
		h.mu.Unlock()
		g.wantSnapshot(fmt.Sprintf("change is based on generation %d, current is %d", c.Base, at))
		return false, nil
	}
	defer h.mu.Unlock()
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	for _, k := range c.Removed {
		g.remove(k)
	}
	for _, p := range c.Put {
		g.put(p)
	}
	return true, g.applied(ctx, c.Generation, &h.stats.changes)
}

// applied ends a step that a message of the guest began. h.mu is held.
func (g *guest) applied(ctx context.Context, generation uint64, count interface{ Add(uint64) uint64 }) error {
	count.Add(1)
	g.generation, g.ack, g.resync = generation, true, ""
	g.limitKept()
	g.h.commit(ctx)
	g.writer.Notify()
	if g.overLimit() {
		return fmt.Errorf("%w: more than %d publications, or than %d bytes of names and labels",
			errProtocol, wire.MaxPublications, wire.MaxSetBytes)
	}
	return nil
}

func (g *guest) overLimit() bool {
	return len(g.pubs) > wire.MaxPublications || g.text > wire.MaxSetBytes
}

// put adds or replaces one publication. h.mu is held.
func (g *guest) put(p wire.Publication) {
	pub := g.pubs[p.Key]
	if pub == nil {
		pub = &publication{guest: g, Key: p.Key, since: time.Now()}
		g.pubs[p.Key] = pub
	}
	if !equal(pub.wire, p) {
		g.h.changed[pub] = struct{}{}
	}
	g.text += p.TextBytes() - pub.wire.TextBytes()
	again := !pub.wire.Owner.Same(p.Owner) || pub.wire.Rule != p.Rule || pub.wire.Wish() != p.Wish() ||
		(len(pub.wire.Demands) > 0) != (len(p.Demands) > 0)
	pub.wire = p
	if again {
		g.h.touch(pub)
	}
	pub.tries = 0
	g.decide(pub)
	g.unkeep(pub)   // now that connections which waited are told of the decision
	g.report(p.Key) // even if nothing changed
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
	d := h.policy.Host(g.name, pub.wire.Port(), slices.Clone(pub.wire.Host))
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
		if pub.wire.Source == port.SourceDemand {
			c.names = pub.wire.Demands
		}
		c.outcome = port.Outcome{Key: pub.Key, State: port.Pending, HostAddress: a, Since: time.Now()}
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
		pub.denied = &port.Outcome{Key: pub.Key, State: port.Denied, Reason: reason, Since: time.Now()}
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
	g.text -= pub.wire.TextBytes()
	delete(g.pubs, k)
	delete(g.dirty, k)
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

// report notes that the outcomes of k are to be sent to the guest. h.mu is held.
func (g *guest) report(k port.Key) {
	g.dirty[k] = struct{}{}
	g.writer.Notify()
}

// write sends the guest the outcomes of its publications until ctx ends. Of changes
// that are faster than the guest reads, only the latest state is sent.
func (g *guest) write(ctx context.Context, session link.Session) {
	control := session.Control()
	for {
		select {
		case <-ctx.Done():
			return
		case <-session.Done():
			return
		case <-g.writer:
		}
		for _, c := range g.messages() {
			_ = control.SetWriteDeadline(time.Now().Add(controlTimeout))
			if err := wire.WriteControl(control, c); err != nil {
				if ctx.Err() == nil {
					g.log.Debug("write to the guest failed", "err", err)
				}
				_ = session.CloseWith(link.ReasonSilent)
				return
			}
		}
	}
}

// messages returns what there is to send.
func (g *guest) messages() []wire.Control {
	h := g.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if g.resync != "" {
		c := wire.Control{Resync: &wire.Resync{Reason: g.resync}}
		g.resync = ""
		return []wire.Control{c}
	}
	var out []wire.Outcome
	for _, k := range slices.SortedFunc(maps.Keys(g.dirty), port.Key.Compare) {
		if pub := g.pubs[k]; pub != nil && !g.kept.has(k) {
			for _, o := range pub.outcomes() {
				o.Reason = forGuest(o.Reason)
				out = append(out, wire.FromOutcome(o))
			}
		}
	}
	if len(g.dirty) > 1024 {
		g.dirty = make(map[port.Key]struct{})
	} else {
		clear(g.dirty)
	}
	if g.ack {
		g.ack = false
		return wire.Ack{Generation: g.generation, Outcomes: out}.Split()
	}
	return wire.Outcomes{Outcomes: out}.Split()
}

// forGuest is what a guest is told: not which port of another guest has an address.
func forGuest(r port.Reason) port.Reason {
	if r.Code() == port.HeldByRival {
		return port.Because(port.HeldElsewhere, r.Args()[0])
	}
	return r
}

// equal reports whether both are the same.
func equal(a, b wire.Publication) bool {
	return a.Key == b.Key && a.Source == b.Source && a.Rule == b.Rule &&
		a.Owner.Equal(b.Owner) && a.OwnerPending == b.OwnerPending && slices.Equal(a.Host, b.Host) &&
		slices.EqualFunc(a.Others, b.Others, port.Owner.Equal) && a.Wish() == b.Wish() && slices.Equal(a.Demands, b.Demands)
}
