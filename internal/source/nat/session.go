// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	bpfkernel "github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/netwatch"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/source/nat/compile"
	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/source/nat/watch"
)

// system is the kernel as a session uses it.
type system interface {
	// Watch opens a stream of commits by a method other than MethodGeneration.
	Watch(method string) (watch.Stream, error)
	// Hookable tells whether the hooks of nftables may be attached to now.
	Hookable() bool
	// Resolve completes messages of hooks, see message.bare.
	Resolve(msgs []*ruleset.Message, known watch.Known) ([]*ruleset.Message, error)
	// NetworkChanged receives after what network returns has changed.
	NetworkChanged() <-chan struct{}
	Generation() (uint32, error)
	Dump(ctx context.Context) (*ruleset.Snapshot, error)
	// Exists tells whether there is a table.
	Exists(t ruleset.TableID) (bool, error)
	LegacyTables() (v4, v6 bool, err error)
	Legacy(v6 bool) (*ruleset.Table, error)
	Network() (netwatch.Snapshot, error)
}

const (
	maxPending   = 200_000 // messages of commits that wait for their turn
	maxProblems  = 1000
	minDelay     = 100 * time.Microsecond
	maxDelay     = 5 * time.Second
	deltaShare   = 3                      // of time worked, that much is rested after a commit
	burst        = 20 * time.Millisecond  // of which this much may be put off
	dumpShare    = 9                      // and after a dump
	genPoll      = time.Second            // the last method for nftables
	doubtDelay   = 500 * time.Millisecond // until the order of inserted rules is checked
	dumpAttempts = 20
	absentPoll   = 30 * time.Second
	ownedPoll    = 10 * time.Second      // of tables that go with their owner, of which nothing is said
	climbDelay   = 20 * time.Millisecond // until a loaded module is looked for again
	maxClimbs    = 8
	auditShare   = 30_000 // of what an audit took, before the next one
	auditMost    = 30 * time.Minute
	legacyMost   = 30 * time.Second // between two polls, whatever they cost
)

// session is one life of the sockets. All its fields belong to run's goroutine.
type session struct {
	s    *Source
	sys  system
	feed registry.Feed
	c    *compile.Compiler
	m    *compile.Mirror

	ended    chan struct{} // closed at the end
	pumps    sync.WaitGroup
	streams  []watch.Stream // to be closed at the end
	events   chan batch     // of current
	current  watch.Stream   // of commits; nil while the generation is polled
	level    string         // the method in use for nftables
	hookable bool           // hooks could be attached to when level was chosen
	climbAt  time.Time      // when a better method is tried; zero: not
	climbs   int
	low      bool // a better method is tried after the first set

	pending []*ruleset.Message // complete commits, each ending with a msgNewGen
	partial []*ruleset.Message // of a commit that has not ended
	absent  bool               // no nftables
	have    [parts]bool        // what was read since the start
	broken  [parts]error       // what could not be read the last time
	known   bool               // feed has a complete set from this session

	busyUntil   time.Time // no commit is worked out before
	idleFrom    time.Time // when the work done so far is rested from
	dumpAfter   time.Time // no dump before
	legacyAfter time.Time // no legacy table is read before
	legacyCost  time.Duration

	wantDump, wantLegacy bool
	auditAt, legacyAt    time.Time
	legacyAuditAt        time.Time
	polling              bool // of the generation
	genAt                time.Time
	ownedAt              time.Time
	failures             int
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
	from watch.Stream
	msgs []*ruleset.Message
	err  error
}

// goesOn reports whether a stream gives more after err.
func goesOn(err error) bool {
	return err == nil || errors.Is(err, watch.ErrLost) || errors.Is(err, watch.ErrMany)
}

// pump hands what a stream receives to a channel until the stream is closed.
func pump(st watch.Stream, out chan<- batch, done <-chan struct{}) {
	for {
		msgs, err := st.Next()
		select {
		case out <- batch{st, msgs, err}:
		case <-done:
			return
		}
		if !goesOn(err) {
			return
		}
	}
}

// run keeps feed equal to the ruleset until ctx ends (nil) or a socket breaks.
func (x *session) run(ctx context.Context) error {
	x.ended, x.events = make(chan struct{}), make(chan batch, 64)
	defer func() {
		close(x.ended)
		for _, st := range x.streams {
			_ = st.Close()
		}
		x.pumps.Wait()
	}()
	// To attach hooks takes time: begin with what does not, and climb from there.
	methods := x.s.opt.Methods
	if i := slices.Index(methods, MethodNetlink); i > 0 {
		methods, x.low = methods[i:], true
	}
	if err := x.watch(methods); x.level == "" {
		return fmt.Errorf("watch nftables: %w", err)
	} else if !x.low {
		x.s.tell(x.level, err)
	}
	var wake, modules <-chan struct{}
	if w := x.s.opt.Wake; w != nil {
		wake, modules = w.LegacyChanged(), w.ModuleLoaded()
	}
	x.feed.Method(x.method(wake != nil))

	x.wantDump, x.wantLegacy = true, true
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if x.climb(time.Now()) {
			x.feed.Method(x.method(wake != nil))
		}
		next := x.work(ctx, time.Now(), wake != nil)
		timer.Reset(max(time.Until(next), 0))
		select {
		case <-ctx.Done():
			return nil
		case b := <-x.events:
			if err := x.take(b); err != nil {
				return err
			}
			for more := true; more; { // what has come together is worked out together
				select {
				case b := <-x.events:
					if err := x.take(b); err != nil {
						return err
					}
				default:
					more = false
				}
			}
		case <-x.sys.NetworkChanged():
			x.readHost()
		case _, ok := <-wake:
			if !ok {
				wake = nil
				x.feed.Method(x.method(false))
			}
			x.wantLegacy = true
		case _, ok := <-modules:
			if !ok {
				modules = nil
			} else if x.level != x.s.opt.Methods[0] {
				x.climbAt, x.climbs = time.Now(), 0
			}
		case <-timer.C:
		}
	}
}

// start pumps a stream until the session ends or the stream is closed.
func (x *session) start(st watch.Stream) {
	x.streams = append(x.streams, st)
	x.pumps.Go(func() { pump(st, x.events, x.ended) })
}

// Watch takes the first of the methods that works, and returns why others do not.
func (x *session) watch(methods []string) error {
	x.hookable = x.sys.Hookable()
	var errs []error
	for _, r := range methods {
		if r == MethodGeneration {
			x.level, x.polling = r, true
			break
		}
		st, err := x.sys.Watch(r)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", r, err))
			continue
		}
		x.level, x.polling, x.current = r, false, st
		x.start(st)
		break
	}
	return errors.Join(errs...)
}

// tell logs the method in use, if it is another than the last one.
func (s *Source) tell(method string, better error) {
	if method != s.method {
		s.method = method
		s.log.Info("nftables is watched", "method", method, "better", bpfkernel.Brief(better))
	}
}

// climb takes a better method, and reads all anew: after the first set was said, and
// when the hooks may be attached to and could not before. It reports whether the
// method is another.
func (x *session) climb(now time.Time) bool {
	switch {
	case x.low && x.known:
		x.low = false
	case x.climbAt.IsZero() || now.Before(x.climbAt):
		return false
	case x.hookable:
		x.climbAt = time.Time{}
		return false // it is no module that was missing
	case !x.sys.Hookable():
		x.climbAt = time.Time{}
		// A module is told of before it is ready.
		if x.climbs++; x.climbs < maxClimbs {
			x.climbAt = now.Add(climbDelay << x.climbs)
		}
		return false
	default:
		x.climbAt = time.Time{}
	}
	better := x.s.opt.Methods[:slices.Index(x.s.opt.Methods, x.level)]
	old, level := x.current, x.level
	err := x.watch(better)
	x.s.tell(x.level, err)
	if x.level == level {
		return false
	}
	if old != nil {
		x.streams = slices.DeleteFunc(x.streams, func(st watch.Stream) bool { return st == old })
		_ = old.Close()
	}
	x.pending, x.partial = nil, nil
	x.wantDump = true
	return true
}

func (x *session) method(wake bool) string {
	var words []string
	if x.polling {
		words = append(words, "generation poll "+genPoll.String())
	} else {
		words = append(words, x.level)
	}
	if wake {
		words = append(words, "legacy "+x.s.opt.Wake.Method())
	} else {
		words = append(words, "legacy poll "+x.s.opt.LegacyPoll.String())
	}
	return strings.Join(words, ", ")
}

// take sorts received messages into whole commits.
func (x *session) take(b batch) error {
	if b.from != x.current { // it was replaced by a better one
		return nil
	}
	switch {
	case b.err == nil:
	case errors.Is(b.err, watch.ErrMany):
		x.pending, x.partial = nil, nil
		x.wantDump = true
		return nil
	case errors.Is(b.err, watch.ErrLost):
		x.lost(b.err)
		return nil
	default:
		return fmt.Errorf("watch nftables: %w", b.err)
	}
	if x.wantDump {
		// The dump will have all that is received before it. A commit that has not
		// ended is kept out by its generation.
		x.pending, x.partial = nil, nil
	}
	for _, m := range b.msgs {
		x.partial = append(x.partial, m)
		if m.Type == ruleset.MsgNewGen {
			x.pending = append(x.pending, x.partial...)
			x.partial = x.partial[:0]
		}
	}
	if len(x.pending)+len(x.partial) > maxPending {
		x.lost(watch.ErrLost)
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
		x.auditAt, x.legacyAuditAt = now.Add(opt.Audit), now.Add(opt.Audit)
	}
	if x.absent && (len(x.pending) > 0 || !now.Before(x.genAt)) {
		x.wantDump, x.genAt = true, now.Add(absentPoll)
	}
	if x.polling && !x.wantDump && !now.Before(x.genAt) {
		x.genAt = now.Add(genPoll)
		if gen, err := x.sys.Generation(); err != nil || gen != x.m.Generation() {
			x.wantDump = true
		}
	}
	owned := x.c.OwnedTables()
	if len(owned) == 0 {
		x.ownedAt = time.Time{}
	} else if x.ownedAt.IsZero() {
		x.ownedAt = now.Add(ownedPoll)
	} else if !now.Before(x.ownedAt) {
		x.ownedAt = now.Add(ownedPoll)
		for _, id := range owned {
			if there, err := x.sys.Exists(id); err != nil || !there {
				x.wantDump = true
			}
		}
	}
	audit := !now.Before(x.auditAt)
	if audit {
		x.auditAt = now.Add(opt.Audit)
	}
	if audit || !now.Before(x.legacyAuditAt) {
		x.legacyAuditAt = now.Add(opt.Audit)
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
	soon(true, x.legacyAuditAt)
	soon(!x.climbAt.IsZero(), x.climbAt)
	soon(x.low && x.known, now)
	soon(x.polling || x.absent, x.genAt)
	if len(x.c.OwnedTables()) > 0 { // what was just read may have some
		if x.ownedAt.IsZero() {
			x.ownedAt = now.Add(ownedPoll)
		}
		soon(true, x.ownedAt)
	}
	soon(x.wantDump, x.dumpAfter)
	soon(len(x.pending) > 0 && !x.wantDump, x.busyUntil)
	soon(x.wantLegacy, x.legacyAfter)
	soon(!wake, x.legacyAt)
	return at
}

// Resolve returns the pending messages, completed.
func (x *session) resolve() ([]*ruleset.Message, error) {
	if x.level != MethodFentry && x.level != MethodKprobe {
		return x.pending, nil
	}
	// What the last dump has need not be asked for.
	from := 0
	for i, m := range x.pending {
		if m.Type == ruleset.MsgNewGen {
			if int32(m.Generation-x.m.Generation()) > 0 {
				break
			}
			from = i + 1
		}
	}
	return x.sys.Resolve(x.pending[from:], x.m)
}

// fail keeps what stands and says why; what failed is tried again later.
func (x *session) fail(part int, err error) time.Time {
	x.count(func(st *Status) { st.Failures++ })
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
		x.feed.Replace(x.c.Bindings())
	default:
		x.say(ch)
	}
}

// readHost takes over what the machine is like; a failure ends with the next change.
func (x *session) readHost() {
	net, err := x.sys.Network()
	if err != nil {
		x.fail(partHost, err)
		return
	}
	x.c.SetHost(hostOf(&net))
	x.done(partHost, x.c.Commit())
}

// applyPending applies all commits that have come, as one step.
func (x *session) applyPending(now time.Time) {
	pending, err := x.resolve()
	if err != nil {
		if !errors.Is(err, watch.ErrMoved) {
			x.lost(err)
		}
		x.pending, x.wantDump = nil, true
		return
	}
	commits := uint64(0)
	from := 0
	for i, m := range pending {
		if m.Type != ruleset.MsgNewGen {
			continue
		}
		if err := x.m.Commit(pending[from:i], m.Generation); err != nil {
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
	ch := x.c.Commit()
	if x.c.Incomplete() {
		// A set that no packet met until now: read it before anything is said.
		x.wantDump, x.known, x.have[partNFT] = true, false, false
		return
	}
	x.say(ch)
	x.count(func(st *Status) { st.Commits += commits })
	x.busyUntil = x.pace(now, time.Now())
	if x.m.OrderDoubtful() {
		if t := time.Now().Add(doubtDelay); t.Before(x.auditAt) {
			x.auditAt = t
		}
	}
}

// readDump reads the nftables ruleset. An audit only compares, when nothing
// happened since.
func (x *session) readDump(ctx context.Context, audit bool) {
	began := time.Now()
	var snap *ruleset.Snapshot
	err := watch.ErrMoved
	for try := 0; try < dumpAttempts && errors.Is(err, watch.ErrMoved) && ctx.Err() == nil; try++ {
		snap, err = x.sys.Dump(ctx)
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
	case errors.Is(err, watch.ErrAbsent):
		x.absent = true
		snap = &ruleset.Snapshot{}
		x.genAt = time.Now().Add(absentPoll)
	case err != nil && audit && errors.Is(err, watch.ErrMoved):
		x.auditAt = x.dumpAfter
		return
	case err != nil:
		x.wantDump = true
		x.dumpAfter = later(x.dumpAfter, x.fail(partNFT, err))
		return
	default:
		x.absent = false
	}
	if audit && snap.Generation != x.m.Generation() {
		x.auditAt = x.dumpAfter // notifications of a later commit are on their way
		return
	}
	x.wantDump = false
	n := x.m.Load(snap)
	if audit && n > 0 {
		x.s.log.Warn("the model had drifted from the kernel's ruleset and was repaired", "objects", n)
		x.count(func(st *Status) { st.Drift += uint64(n) })
	}
	x.done(partNFT, x.c.Commit())
	if opt := x.s.opt; audit && opt.paced {
		now := time.Now()
		x.auditAt = now.Add(max(opt.Audit, min(auditShare*now.Sub(began), auditMost)))
	}
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
	var problems []compile.Problem
	var all int
	fresh := x.c.ProblemsChanged()
	if fresh {
		problems, all = x.c.Problems(maxProblems)
	}
	published, evaluated := x.c.Counts()
	x.count(func(st *Status) {
		if fresh {
			st.Problems, st.ProblemCount = problems, all
		}
		st.Published, st.Evaluated = published, uint64(evaluated)
	})
}

// readLegacy reads the legacy tables, if there are any.
func (x *session) readLegacy() {
	began := time.Now()
	err := x.loadLegacy()
	took := time.Since(began)
	x.legacyAfter = rest(time.Now(), took, dumpShare)
	// Polling costs at most half a percent of a core. One slow read, as on a busy
	// machine, says little of the cost, and many are no reason to look no more.
	x.legacyCost = min(took, max(2*x.legacyCost, 100*time.Microsecond))
	x.legacyAt = time.Now().Add(max(x.s.opt.LegacyPoll, min(200*x.legacyCost, legacyMost)))
	if err != nil {
		x.legacyAfter = later(x.legacyAfter, x.fail(partLegacy, err))
		return
	}
	x.wantLegacy = false
	x.done(partLegacy, x.c.Commit())
}

func (x *session) loadLegacy() error {
	v4, v6, err := x.sys.LegacyTables()
	if err != nil {
		return err
	}
	for _, six := range []bool{false, true} {
		snap := &ruleset.Snapshot{}
		fam := uint8(ruleset.FamilyIP)
		if six {
			fam = ruleset.FamilyIP6
		}
		if six && v6 || !six && v4 {
			t, err := x.sys.Legacy(six)
			if err != nil {
				return err
			}
			snap.Tables = []*ruleset.Table{t}
			x.count(func(st *Status) { st.LegacyReads++ })
		}
		x.c.Sync(snap, func(id ruleset.TableID) bool { return id.Legacy && id.Family == fam })
	}
	return nil
}
