// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/kernel"
)

// eventSource is where events come from. All methods but Wait are called by one
// goroutine at a time.
type eventSource interface {
	// Read lends up to limit samples to f and returns how many records it used
	// up; 0 says that none is there.
	Read(limit int, f func(sample []byte)) (int, error)
	// Wait blocks until there is something to read, or the source is shut. With
	// a doze above 0 UDP does not end it, but that time does.
	Wait(doze time.Duration) error
	Position() uint64 // of the next read
	End() uint64      // behind the last record begun
	// takeLost reports whether events were lost since it was last asked.
	takeLost() bool
	// Rearm is called by whoever read while another waits: it has the waiter
	// woken again, and reports whether there is something to read already.
	Rearm() bool
	// drops counts the events that were lost so far, and of them those whose
	// hook was skipped.
	drops() (all, skipped uint64)
	// open lets the hooks report the end of sockets that they do not track.
	open(bool)
	track(cookie uint64) error
	untrack(cookie uint64)
	trackable() int
}

const (
	dumpShare = 20 // at most 1/20 of the time is for dumps that events ask for

	// Where the time between audits is ours to choose, they take at most
	// 1/auditShare of it, but come at least each auditMost.
	auditShare = 30_000
	auditMost  = 10 * time.Minute

	retryFirst = 100 * time.Millisecond
	retryMost  = 10 * time.Second

	// A dump of more rows than fit a message can miss one; audit it soon.
	singleMessageRows = 200
	firstAudit        = time.Second

	// Dumping bound sockets costs twenty times as much as the rest (it walks the
	// hash of all ports), so it is done at each tenth poll.
	boundPolls = 10

	ownerPause = time.Second // at least, between searches of /proc
)

// checkDelays are when a socket is looked at after it began to connect.
func checkDelays() []time.Duration {
	return []time.Duration{time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond}
}

// counters are Stats, kept for all goroutines.
type counters struct {
	events, malformed, drops, skipped, resyncs, drift, dumps, dumpFailures atomic.Uint64
	dumpTime, sockets                                                      atomic.Int64
	methods                                                                atomic.Pointer[[]kernel.Method]
}

// engine keeps the model true and tells the handler. Two goroutines work in it:
// one reads events, one dumps.
type engine struct {
	handler  Handler
	log      *slog.Logger
	counters *counters
	source   eventSource // nil: all is polled
	dump     func(context.Context, scope) ([]row, scope, error)
	owners   func(context.Context, []Socket) map[uint64]owner // nil: not looked for
	polled   scope                                            // what has no events
	interval time.Duration
	audit    time.Duration
	paced    bool // audit is the least

	// kick wakes the dumper, ownerKick the owners' search; capacity one.
	kick, ownerKick chan struct{}

	// mu guards all below, the source but for its wait, and calls of the handler.
	mu      sync.Mutex
	model   *model
	decoder *decoder
	record  record
	batch   []Event
	live    bool // the handler has had a Replace
	stale   bool // the last dump failed
	resync  bool // events were lost
	seen    struct{ drops, skipped uint64 }

	tcp, udp bool                 // what was read since take was called
	dozing   bool                 // UDP is read once each dozeSpacing
	young    map[uint64]time.Time // UDP that is not told yet, and when it was read

	resolve   scope     // what events need a dump of, to be understood
	resolveAt time.Time // when
	checks    int       // how many of checkDelays have passed

	retryAt   time.Time // after a failure; zero if the last dump succeeded
	backoff   time.Duration
	notBefore time.Time // next dump that events may ask for
	pollAt    time.Time // zero: never
	polls     int       // since bound sockets were polled
	auditAt   time.Time // zero: never
	checkAt   time.Time // when to look for events lost without a sign; zero: at audits only
}

func newEngine(h Handler, log *slog.Logger, c *counters) *engine {
	return &engine{
		handler:   h,
		log:       log,
		counters:  c,
		kick:      make(chan struct{}, 1),
		ownerKick: make(chan struct{}, 1),
		model:     newModel(),
		decoder:   newDecoder(),
		young:     make(map[uint64]time.Time),
	}
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// ask plans a dump that an event needs.
func (e *engine) ask(s scope, at time.Time) {
	if at.Before(e.notBefore) {
		at = e.notBefore
	}
	e.resolve |= s
	if e.resolveAt.IsZero() || at.Before(e.resolveAt) {
		e.resolveAt = at
		wake(e.kick)
	}
}

// apply tells the handler of changes that did not come by events, in order.
func (e *engine) apply(changes []Event) {
	if len(e.young) > 0 {
		changes = slices.DeleteFunc(changes, func(change Event) bool { return e.withheld(&change) })
	}
	e.tell(changes)
}

func (e *engine) tell(changes []Event) {
	if len(changes) == 0 {
		return
	}
	e.counters.sockets.Store(int64(len(e.model.sockets)))
	if e.live {
		e.handler.Apply(changes)
	}
}

// lost says that the model may be wrong, and has it put right by a dump.
func (e *engine) lost(reason string) {
	if e.resync {
		return
	}
	e.resync = true
	e.log.Warn("Events were lost; dumping sockets again", "reason", reason)
	wake(e.kick)
}

// checkDrops notices events that were lost without a sign in the ring.
func (e *engine) checkDrops() {
	if e.source != nil && e.countDrops() {
		e.lost("hooks were skipped")
	}
}

// countDrops reports whether events were lost since it was last asked.
func (e *engine) countDrops() bool {
	all, skipped := e.source.drops()
	if all <= e.seen.drops {
		return false
	}
	e.counters.drops.Add(all - e.seen.drops)
	e.counters.skipped.Add(skipped - e.seen.skipped)
	e.seen.drops, e.seen.skipped = all, skipped
	return true
}

// job is a dump to be made now.
type job struct {
	scope   scope
	replace bool // end with Replace
	polled  scope
	audited scope
	resolve scope
}

// due returns what is to be done now, or when to look again (zero: when kicked).
func (e *engine) due(now time.Time) (j job, next time.Time) {
	reached := func(t time.Time) bool {
		if t.IsZero() {
			return false
		}
		if t.After(now) {
			if next.IsZero() || t.Before(next) {
				next = t
			}
			return false
		}
		return true
	}
	if !e.retryAt.IsZero() && !reached(e.retryAt) {
		return job{}, next
	}
	if !e.live || e.stale {
		return job{scope: scopeAll, replace: true}, time.Time{}
	}
	if reached(e.checkAt) {
		e.checkDrops()
		e.checkAt = now.Add(e.audit)
		reached(e.checkAt)
	}
	if e.resync && (e.notBefore.IsZero() || reached(e.notBefore)) {
		return job{scope: scopeAll, replace: true}, time.Time{}
	}
	if reached(e.resolveAt) {
		j.resolve = e.resolve
	}
	if reached(e.pollAt) {
		j.polled = e.polled
		if e.polls+1 < boundPolls && e.polled != scopeTCPBound {
			j.polled &^= scopeTCPBound
		}
	}
	if reached(e.auditAt) {
		j.audited = scopeAll &^ e.polled
	}
	j.scope = j.polled | j.resolve | j.audited
	return j, next
}

// dumps makes the dumps that are due, until ctx ends or the source breaks.
func (e *engine) dumps(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		e.mu.Lock()
		j, next := e.due(time.Now())
		e.mu.Unlock()
		if j.scope != 0 {
			if err := e.run(ctx, j); err != nil {
				return err
			}
			continue
		}
		timer.Stop()
		if !next.IsZero() {
			timer.Reset(time.Until(next))
		}
		select {
		case <-ctx.Done():
		case <-e.kick:
		case <-timer.C:
		}
	}
	return nil
}

// run makes one dump and merges it. Its error is one of the source; a failed
// dump is told to the handler and tried again.
func (e *engine) run(ctx context.Context, j job) error {
	start := time.Now()
	e.mu.Lock()
	// What events ask for from here on needs another dump.
	if j.scope&e.resolve == e.resolve {
		e.resolve, e.resolveAt = 0, time.Time{}
	}
	if j.replace {
		e.resync = false
	}
	e.model.begin()
	gated := e.source != nil && j.scope&(scopeTCPBound|scopeUDP) != 0
	if gated {
		e.source.open(true)
	}
	e.mu.Unlock()

	rows, covered, dumpErr := e.dump(ctx, j.scope)
	again := false
	if dumpErr == nil {
		absent, err := e.merge(j, rows, covered)
		if err != nil {
			return err
		}
		if absent > 0 {
			// The kernel can skip a row when its neighbours change: only what
			// two dumps miss is gone.
			again = true
			rows, covered, dumpErr = e.dump(ctx, j.scope)
		}
	}

	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.model.end()
	now := time.Now()
	e.counters.dumpTime.Add(int64(now.Sub(start)))
	e.notBefore = now.Add(dumpShare * now.Sub(start))
	if dumpErr != nil {
		if ctx.Err() == nil {
			e.failed(j, dumpErr)
		}
		return nil
	}
	e.counters.dumps.Add(1)
	if err := e.drain(); err != nil {
		return err
	}
	var changes []Event
	if again {
		changes = e.model.merge(rows, nil)
	}
	changes = e.model.expire(covered, changes)
	e.settled(j, changes)
	e.finish(j, covered, len(rows))
	if gated {
		e.source.open(!e.trackAll())
	}
	e.schedule(j, start, len(rows))
	return nil
}

// merge takes in the rows of a first dump and returns how many sockets it misses.
func (e *engine) merge(j job, rows []row, covered scope) (absent int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.drain(); err != nil {
		return 0, err
	}
	e.settled(j, e.model.merge(rows, nil))
	return e.model.absent(covered), nil
}

// settled tells of what a dump changed, and counts what should not have been.
func (e *engine) settled(j job, changes []Event) {
	drift := uint64(0)
	for i := range changes {
		s := &changes[i].Socket
		if of := scopeOf(s); e.live && j.audited&of != 0 && j.resolve&of == 0 && s.Observed == 0 {
			drift++
		}
		if changes[i].Gone && e.source != nil {
			e.source.untrack(s.Cookie)
		}
	}
	if drift > 0 {
		e.counters.drift.Add(drift)
		e.log.Warn("Sockets had drifted from what the kernel says; repaired", "sockets", drift)
	}
	e.apply(changes)
}

// finish ends what waited for this dump, and replaces the set if that is due.
func (e *engine) finish(j job, covered scope, rows int) {
	if e.stale {
		e.log.Info("Dumping sockets works again")
	}
	e.retryAt, e.backoff = time.Time{}, 0
	if j.replace {
		if e.live && !e.stale {
			e.counters.resyncs.Add(1)
			if e.source != nil {
				e.countDrops()
			}
			if covered&scopeTCPBound == 0 {
				// Nothing can say which of these still are.
				e.forgetBound()
			}
		}
		e.live, e.stale = true, false
		e.counters.sockets.Store(int64(len(e.model.sockets)))
		clear(e.young) // among all
		e.handler.Replace(e.model.all())
		e.log.Debug("Sockets dumped", "sockets", len(e.model.sockets), "rows", rows)
	}
	if e.owners != nil {
		wake(e.ownerKick)
	}
	if e.resolve != 0 {
		return // more has come
	}
	waiting := scope(0)
	if len(e.model.portless) > 0 {
		waiting |= scopeTCPListen
	}
	if len(e.model.connecting) > 0 {
		waiting |= scopeUDP
	}
	if waiting != 0 {
		if delays := checkDelays(); e.checks+1 < len(delays) {
			e.checks++
			e.ask(waiting, time.Now().Add(delays[e.checks]))
			return
		}
	}
	e.checks = 0
	e.model.forgetWaiting() // to the audit
}

func (e *engine) forgetBound() {
	var gone []Event
	for cookie, en := range e.model.sockets {
		if scopeOf(&en.socket) == scopeTCPBound {
			if change, ok, _ := e.model.drop(cookie, 0); ok {
				gone = append(gone, change)
			}
			e.source.untrack(cookie)
		}
	}
	e.apply(gone)
}

// trackAll lets the hooks report the end of the sockets that only a dump knew.
// It reports whether they now know all of them, with room for more.
func (e *engine) trackAll() bool {
	n := 0
	for cookie, en := range e.model.sockets {
		if scopeOf(&en.socket) == scopeTCPListen {
			continue
		}
		n++
		if en.tracked {
			continue
		}
		if err := e.source.track(cookie); err != nil {
			return false
		}
		en.tracked = true
	}
	return n <= e.source.trackable()/4*3
}

// failed tells that a dump failed and plans the next try.
func (e *engine) failed(j job, err error) {
	e.counters.dumpFailures.Add(1)
	if j.replace && e.live && !e.stale {
		e.resync = true
	}
	if e.backoff == 0 {
		e.backoff = retryFirst
	} else {
		e.backoff = min(2*e.backoff, retryMost)
	}
	e.retryAt = time.Now().Add(e.backoff)
	if !e.stale {
		e.log.Error("Dumping sockets failed; what is known may be old", "err", err)
	}
	e.stale = true
	e.handler.Stale(fmt.Errorf("observer: %w", err))
}

// schedule plans the next dumps after one that began at start and succeeded.
func (e *engine) schedule(j job, start time.Time, rows int) {
	now := time.Now()
	switch {
	case e.polled == 0 || !j.replace && j.polled == 0:
	case e.polled == scopeTCPBound:
		e.pollAt = now.Add(boundPolls * e.interval)
	default:
		e.pollAt = now.Add(e.interval)
		if e.polls++; j.scope&scopeTCPBound != 0 {
			e.polls = 0
		}
	}
	if e.source == nil {
		return
	}
	switch {
	case j.replace && rows > singleMessageRows:
		e.auditAt = now.Add(firstAudit)
	case j.replace || j.audited != 0:
		switch {
		case e.audit < 0:
			e.auditAt = time.Time{}
		case e.paced && !j.replace:
			e.auditAt = now.Add(max(e.audit, min(auditShare*now.Sub(start), auditMost)))
			e.checkAt = now.Add(e.audit)
		default:
			e.auditAt = now.Add(e.audit)
		}
		e.checkDrops()
	}
}

// findOwners searches for the processes of sockets that only a dump knew, until
// ctx ends. One search follows another after a pause, however much there is.
func (e *engine) findOwners(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.ownerKick:
		}
		wanted := e.ownerless()
		if len(wanted) == 0 {
			continue
		}
		start, seen := time.Now(), monotonicNow()
		found := e.owners(ctx, wanted)
		e.setOwners(found, seen)
		pause := time.NewTimer(max(ownerPause, dumpShare*time.Since(start)))
		select {
		case <-ctx.Done():
			pause.Stop()
			return
		case <-pause.C:
		}
	}
}

// ownerless returns the sockets whose process is not known and was not sought.
func (e *engine) ownerless() []Socket {
	e.mu.Lock()
	defer e.mu.Unlock()
	var wanted []Socket
	for _, en := range e.model.sockets {
		if en.socket.PID == 0 && en.socket.Comm == "" && !en.ownerSought {
			en.ownerSought = true
			wanted = append(wanted, en.socket)
		}
	}
	return wanted
}

// setOwners notes the processes that a search found, which began at the time
// seen of CLOCK_MONOTONIC, in nanoseconds.
func (e *engine) setOwners(found map[uint64]owner, seen int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var changes []Event
	for cookie, o := range found {
		en := e.model.sockets[cookie]
		if en == nil || en.socket.PID != 0 || en.socket.Comm != "" {
			continue
		}
		en.socket.PID, en.socket.Comm, en.socket.PIDSeen = o.pid, o.comm, seen
		changes = append(changes, Event{Socket: en.socket})
	}
	e.apply(changes)
}
