// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/registry"
)

// Options say what a Source watches and how. The zero value of a field stands
// for its default.
type Options struct {
	// Log receives transitions. Nil discards them.
	Log *slog.Logger
	// NetNS is the path of the network namespace to watch; empty is the process's own.
	NetNS string
	// MaxPorts is how many ports one rule may publish, 1 to 65,535; 4,096 by default.
	MaxPorts int
	// Audit is how often the model is compared with a dump; 5 minutes by default.
	Audit time.Duration
	// LegacyPoll is how often a legacy table is read while nothing tells of
	// changes to it; 2 seconds by default.
	LegacyPoll time.Duration
	// Wake, if not nil, tells of changes at once. A closed channel means that it
	// has broken, and the source polls again.
	Wake Waker
}

// Waker tells of changes that nfnetlink does not notify of: a legacy table
// that was replaced.
type Waker interface {
	// LegacyChanged receives after a legacy nat table of the watched namespace
	// may have been replaced. It is closed when that can no longer be told.
	LegacyChanged() <-chan struct{}
	// Rung names the mechanism: "fexit", "kprobe", "tracepoint".
	Rung() string
}

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.MaxPorts == 0 {
		o.MaxPorts = 4096
	}
	if o.Audit == 0 {
		o.Audit = 5 * time.Minute
	}
	if o.LegacyPoll == 0 {
		o.LegacyPoll = 2 * time.Second
	}
	return o
}

func (o Options) validate() error {
	switch {
	case o.MaxPorts < 1 || o.MaxPorts > 65535:
		return fmt.Errorf("option MaxPorts %d: want 1 to 65535", o.MaxPorts)
	case o.Audit < time.Second:
		return fmt.Errorf("option Audit %v: want at least 1s", o.Audit)
	case o.LegacyPoll < 10*time.Millisecond:
		return fmt.Errorf("option LegacyPoll %v: want at least 10ms", o.LegacyPoll)
	}
	return nil
}

// Status is what a Source can tell of itself.
type Status struct {
	Published    int       // bindings
	Problems     []Problem // what is not understood, sorted, at most 1,000
	ProblemCount int       // how many there are in all
	Commits      uint64    // nftables commits that were applied as changes
	LegacyReads  uint64    // legacy tables that were read
	Dumps        uint64    // whole nftables rulesets that were read
	Lost         uint64    // gaps in the notifications
	Drift        uint64    // objects that an audit found different
	Evaluated    uint64    // rules worked out
}

// Source publishes the ports that NAT rules make reachable.
type Source struct {
	opt Options
	log *slog.Logger

	mu     sync.Mutex
	status Status // guarded by mu
}

// New returns a source; it does nothing until Run.
func New(opt Options) (*Source, error) {
	opt = opt.withDefaults()
	if err := opt.validate(); err != nil {
		return nil, fmt.Errorf("nat source: %w", err)
	}
	return &Source{opt: opt, log: opt.Log}, nil
}

// Name returns "nat".
func (s *Source) Name() string { return sourceName }

// Status returns what is known now. The slices in it are shared and immutable.
func (s *Source) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// errLost says that notifications were dropped.
var errLost = errors.New("notifications were lost")

// errMoved says that the ruleset changed while it was read.
var errMoved = errors.New("the ruleset changed while it was read")

// errAbsent says that the kernel has no nftables.
var errAbsent = errors.New("no nftables in this kernel")

// stream is a socket that receives notifications. next blocks; Close ends it.
type stream interface {
	next() ([]*message, error)
	Close() error
}

// system is the kernel as a session uses it.
type system interface {
	watch() (stream, error)
	watchHost() (stream, error)
	generation() (uint32, error)
	dump(ctx context.Context) (*snapshot, error)
	legacyTables() (v4, v6 bool, err error)
	legacy(v6 bool) (legacyInfo, []byte, error)
	host() (host, error)
}

const (
	maxPending   = 200_000 // messages of commits that wait for their turn
	maxProblems  = 1000
	minDelay     = 100 * time.Microsecond
	maxDelay     = 5 * time.Second
	deltaShare   = 3                      // of time worked, that much is rested after a commit
	burst        = 20 * time.Millisecond  // of which this much may be put off
	dumpShare    = 9                      // and after a dump
	hostDelay    = 50 * time.Millisecond  // links and routes come in bursts
	genPoll      = time.Second            // the last rung for nftables
	doubtDelay   = 500 * time.Millisecond // until the order of inserted rules is checked
	dumpAttempts = 20
	absentPoll   = 30 * time.Second
)

// session is one life of the sockets. All its fields belong to run's goroutine.
type session struct {
	s    *Source
	sys  system
	feed registry.Feed
	c    *compiler
	m    mirror

	pending []*message   // complete commits, each ending with a msgNewGen
	partial []*message   // of a commit that has not ended
	absent  bool         // no nftables
	have    [parts]bool  // what was read since the start
	broken  [parts]error // what could not be read the last time
	known   bool         // feed has a complete set from this session

	busyUntil   time.Time // no commit is worked out before
	idleFrom    time.Time // when the work done so far is rested from
	dumpAfter   time.Time // no dump before
	legacyAfter time.Time // no legacy table is read before
	legacyCost  time.Duration

	wantDump, wantHost, wantLegacy bool
	hostAt, auditAt, legacyAt      time.Time
	polling                        bool // of the generation
	genAt                          time.Time
	failures                       int
}

// The parts of what a session reads.
const (
	partHost = iota
	partNFT
	partLegacy
	parts
)

var partNames = [parts]string{"addresses", "nftables", "iptables-legacy"}

type batch struct {
	msgs []*message
	err  error
}

// pump hands what a stream receives to a channel until the stream is closed.
func pump(st stream, out chan<- batch, done <-chan struct{}) {
	for {
		msgs, err := st.next()
		select {
		case out <- batch{msgs, err}:
		case <-done:
			return
		}
		if err != nil && !errors.Is(err, errLost) {
			return
		}
	}
}

// run keeps feed equal to the ruleset until ctx ends (nil) or a socket breaks.
func (x *session) run(ctx context.Context) error {
	done := make(chan struct{})
	var wg sync.WaitGroup
	var streams []stream
	defer func() {
		close(done)
		for _, st := range streams {
			_ = st.Close()
		}
		wg.Wait()
	}()
	events, hosts := make(chan batch, 64), make(chan batch, 1)
	start := func(st stream, out chan<- batch) {
		streams = append(streams, st)
		wg.Go(func() { pump(st, out, done) })
	}
	if st, err := x.sys.watch(); err != nil {
		x.s.log.Warn("nftables does not notify; its generation is polled", "every", genPoll, "err", err)
		x.polling = true
	} else {
		start(st, events)
	}
	st, err := x.sys.watchHost()
	if err != nil {
		return fmt.Errorf("watch addresses: %w", err)
	}
	start(st, hosts)
	var wake <-chan struct{}
	if x.s.opt.Wake != nil {
		wake = x.s.opt.Wake.LegacyChanged()
	}
	x.feed.Rung(x.rung(wake != nil))

	x.wantDump, x.wantHost, x.wantLegacy = true, true, true
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		next := x.work(ctx, time.Now(), wake != nil)
		timer.Reset(max(time.Until(next), 0))
		select {
		case <-ctx.Done():
			return nil
		case b := <-events:
			if err := x.take(b); err != nil {
				return err
			}
			for more := true; more; { // what has come together is worked out together
				select {
				case b := <-events:
					if err := x.take(b); err != nil {
						return err
					}
				default:
					more = false
				}
			}
		case b := <-hosts:
			if b.err != nil {
				return fmt.Errorf("watch addresses: %w", b.err)
			}
			if !x.wantHost {
				x.wantHost, x.hostAt = true, time.Now().Add(hostDelay)
			}
		case _, ok := <-wake:
			if !ok {
				wake = nil
				x.feed.Rung(x.rung(false))
			}
			x.wantLegacy = true
		case <-timer.C:
		}
	}
}

func (x *session) rung(wake bool) string {
	var words []string
	if x.polling {
		words = append(words, "generation poll "+genPoll.String())
	} else {
		words = append(words, "nfnetlink")
	}
	if wake {
		words = append(words, "legacy "+x.s.opt.Wake.Rung())
	} else {
		words = append(words, "legacy poll "+x.s.opt.LegacyPoll.String())
	}
	return strings.Join(words, ", ")
}

// take sorts received messages into whole commits.
func (x *session) take(b batch) error {
	if b.err != nil {
		if !errors.Is(b.err, errLost) {
			return fmt.Errorf("watch nftables: %w", b.err)
		}
		x.lost(b.err)
		return nil
	}
	if x.wantDump {
		// The dump will have all that is received before it. A commit that has not
		// ended is kept out by its generation.
		x.pending, x.partial = nil, nil
	}
	for _, m := range b.msgs {
		x.partial = append(x.partial, m)
		if m.typ == msgNewGen {
			x.pending = append(x.pending, x.partial...)
			x.partial = x.partial[:0]
		}
	}
	if len(x.pending)+len(x.partial) > maxPending {
		x.lost(errLost)
	}
	return nil
}

func (x *session) lost(err error) {
	x.s.log.Info("nftables is read anew", "err", err)
	x.count(func(st *Status) { st.Lost++ })
	x.pending, x.partial = nil, nil
	x.wantDump = true
}

func (x *session) count(f func(*Status)) {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	f(&x.s.status)
}

// rest returns when work that took d may be done again, so that it never takes
// more than one part in share+1 of a core.
func rest(now time.Time, d time.Duration, share int) time.Time {
	return now.Add(min(max(d*time.Duration(share), minDelay), maxDelay))
}

// pace returns when the next commit may be worked out. Short bursts are answered
// at once; lasting load is held to one part in deltaShare+1 of a core.
func (x *session) pace(began, now time.Time) time.Time {
	if x.idleFrom.Before(began) {
		x.idleFrom = began
	}
	x.idleFrom = x.idleFrom.Add(min(now.Sub(began)*(deltaShare+1), maxDelay))
	return x.idleFrom.Add(-burst)
}

// work does what is due and returns when to look again.
func (x *session) work(ctx context.Context, now time.Time, wake bool) time.Time {
	opt := x.s.opt
	if x.auditAt.IsZero() {
		x.auditAt = now.Add(opt.Audit)
	}
	if x.wantHost && !now.Before(x.hostAt) {
		x.readHost(now)
	}
	if x.absent && (len(x.pending) > 0 || !now.Before(x.genAt)) {
		x.wantDump, x.genAt = true, now.Add(absentPoll)
	}
	if x.polling && !x.wantDump && !now.Before(x.genAt) {
		x.genAt = now.Add(genPoll)
		if gen, err := x.sys.generation(); err != nil || gen != x.m.gen {
			x.wantDump = true
		}
	}
	audit := !now.Before(x.auditAt)
	if audit {
		x.auditAt = now.Add(opt.Audit)
		x.wantLegacy = true
	}
	if len(x.pending) > 0 && !x.wantDump && !now.Before(x.busyUntil) {
		x.applyPending(now)
	}
	if (x.wantDump || audit) && !now.Before(x.dumpAfter) {
		x.readDump(ctx, audit && !x.wantDump)
	} else if audit {
		x.auditAt = x.dumpAfter
	}
	if !wake && !now.Before(x.legacyAt) {
		x.wantLegacy = true
	}
	if x.wantLegacy && !now.Before(x.legacyAfter) {
		x.readLegacy()
	}
	// When is the next thing due?
	at := x.auditAt
	soon := func(on bool, t time.Time) {
		if on && t.Before(at) {
			at = t
		}
	}
	soon(x.wantHost, x.hostAt)
	soon(x.polling || x.absent, x.genAt)
	soon(x.wantDump, x.dumpAfter)
	soon(len(x.pending) > 0 && !x.wantDump, x.busyUntil)
	soon(x.wantLegacy, x.legacyAfter)
	soon(!wake, x.legacyAt)
	return at
}

// fail keeps what stands and says why; what failed is tried again later.
func (x *session) fail(part int, err error) time.Time {
	x.broken[part] = fmt.Errorf("read %s: %w", partNames[part], err)
	x.feed.Stale(errors.Join(x.broken[:]...))
	x.failures = min(x.failures+1, 6)
	return time.Now().Add(100 * time.Millisecond << x.failures)
}

// done states what a part's reading changed, or the whole set if it was the last
// that was missing.
func (x *session) done(part int, ch port.Change) {
	was := errors.Join(x.broken[:]...) != nil
	x.have[part], x.broken[part] = true, nil
	now := errors.Join(x.broken[:]...) != nil
	switch {
	case x.have != [parts]bool{true, true, true}:
	case !x.known || was && !now:
		x.known, x.failures = true, 0
		x.note()
		x.feed.Replace(x.c.bindings())
	default:
		x.say(ch)
	}
}

func (x *session) readHost(now time.Time) {
	h, err := x.sys.host()
	if err != nil {
		x.hostAt = x.fail(partHost, err)
		return
	}
	x.wantHost = false
	x.hostAt = rest(time.Now(), time.Since(now), dumpShare)
	x.c.setHost(h)
	x.done(partHost, x.c.commit())
}

// applyPending applies all commits that have come, as one step.
func (x *session) applyPending(now time.Time) {
	commits := uint64(0)
	from := 0
	for i, m := range x.pending {
		if m.typ != msgNewGen {
			continue
		}
		if err := x.m.commit(x.pending[from:i], m.gen); err != nil {
			x.lost(err)
			return
		}
		from = i + 1
		commits++
	}
	x.pending = x.pending[:0]
	if cap(x.pending) > 4096 {
		x.pending = nil
	}
	x.c.missing = false
	ch := x.c.commit()
	if x.c.missing {
		// A set that no packet met until now: read it before anything is said.
		x.wantDump, x.known, x.have[partNFT] = true, false, false
		return
	}
	x.say(ch)
	x.count(func(st *Status) { st.Commits += commits })
	x.busyUntil = x.pace(now, time.Now())
	if x.m.doubt {
		x.m.doubt = false
		if t := time.Now().Add(doubtDelay); t.Before(x.auditAt) {
			x.auditAt = t
		}
	}
}

// readDump reads the nftables ruleset. An audit only compares, when nothing
// happened since.
func (x *session) readDump(ctx context.Context, audit bool) {
	began := time.Now()
	var snap *snapshot
	err := errMoved
	for try := 0; try < dumpAttempts && errors.Is(err, errMoved) && ctx.Err() == nil; try++ {
		snap, err = x.sys.dump(ctx)
		x.count(func(st *Status) { st.Dumps++ })
		if audit {
			break
		}
	}
	if ctx.Err() != nil {
		return
	}
	x.dumpAfter = rest(time.Now(), time.Since(began), dumpShare)
	switch {
	case errors.Is(err, errAbsent):
		x.absent = true
		snap = &snapshot{}
		x.genAt = time.Now().Add(absentPoll)
	case err != nil && audit && errors.Is(err, errMoved):
		x.auditAt = x.dumpAfter
		return
	case err != nil:
		x.wantDump = true
		x.dumpAfter = later(x.dumpAfter, x.fail(partNFT, err))
		return
	default:
		x.absent = false
	}
	if audit && snap.gen != x.m.gen {
		x.auditAt = x.dumpAfter // notifications of a later commit are on their way
		return
	}
	x.wantDump = false
	x.c.missing = false
	n := x.m.load(snap)
	if audit && n > 0 {
		x.s.log.Warn("the model had drifted from the kernel's ruleset and was repaired", "objects", n)
		x.count(func(st *Status) { st.Drift += uint64(n) })
	}
	x.done(partNFT, x.c.commit())
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// say states a change.
func (x *session) say(ch port.Change) {
	if !x.known {
		return
	}
	x.note()
	if len(ch.Put)+len(ch.Drop) > 0 {
		x.feed.Apply(ch)
	}
}

// note brings the status up to date.
func (x *session) note() {
	var problems []Problem
	var all int
	fresh := x.c.badChanged
	if fresh {
		x.c.badChanged = false
		problems, all = x.c.problems(maxProblems)
	}
	n := x.c.count
	x.count(func(st *Status) {
		if fresh {
			st.Problems, st.ProblemCount = problems, all
		}
		st.Published, st.Evaluated = n, uint64(x.c.evals)
	})
}

// readLegacy reads the legacy tables, if there are any.
func (x *session) readLegacy() {
	began := time.Now()
	err := x.loadLegacy()
	took := time.Since(began)
	x.legacyAfter = rest(time.Now(), took, dumpShare)
	// Polling costs at most half a percent of a core. One slow read, as on a busy
	// machine, says little of the cost.
	x.legacyCost = min(took, max(2*x.legacyCost, 100*time.Microsecond))
	x.legacyAt = time.Now().Add(max(x.s.opt.LegacyPoll, 200*x.legacyCost))
	if err != nil {
		x.legacyAfter = later(x.legacyAfter, x.fail(partLegacy, err))
		return
	}
	x.wantLegacy = false
	x.done(partLegacy, x.c.commit())
}

func (x *session) loadLegacy() error {
	v4, v6, err := x.sys.legacyTables()
	if err != nil {
		return err
	}
	for _, six := range []bool{false, true} {
		snap := &snapshot{}
		fam := uint8(famIP)
		if six {
			fam = famIP6
		}
		if six && v6 || !six && v4 {
			info, raw, err := x.sys.legacy(six)
			if err != nil {
				return err
			}
			t, err := parseLegacy(six, info, raw)
			if err != nil {
				return err
			}
			snap.tables = []*tableSnap{t}
			x.count(func(st *Status) { st.LegacyReads++ })
		}
		x.c.sync(snap, func(id tableID) bool { return id.legacy && id.family == fam })
	}
	return nil
}

// backoff grows from half a second to half a minute.
func backoff(n int) time.Duration {
	return min(500*time.Millisecond<<min(n, 6), 30*time.Second)
}

// wait sleeps unless ctx ends.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// runWith runs sessions over what open gives until ctx ends.
func (s *Source) runWith(ctx context.Context, feed registry.Feed, open func() (system, func(), error)) error {
	c := newCompiler(s.opt.MaxPorts)
	for n := 0; ctx.Err() == nil; n++ {
		known, err := s.live(ctx, feed, c, open)
		if known {
			n = 0
		}
		if ctx.Err() == nil {
			feed.Stale(err)
			wait(ctx, backoff(n))
		}
	}
	return nil
}

// live runs one session and reports whether it got as far as a complete set.
func (s *Source) live(ctx context.Context, feed registry.Feed, c *compiler, open func() (system, func(), error)) (bool, error) {
	sys, done, err := open()
	if err != nil {
		return false, err
	}
	defer done()
	x := &session{s: s, sys: sys, feed: feed, c: c, m: mirror{c: c}}
	err = x.run(ctx)
	return x.known, err
}
