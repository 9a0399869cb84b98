// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/port/schedule"
)

// deadline names what the engine plans.
type deadline uint8

const (
	planRetry   deadline = iota // the next dump after one that failed
	planResolve                 // a dump that events need
	planPoll
	planAudit
	planCheck // for events lost without a sign, between audits
)

const (
	dumpShare = 20 // at most 1/20 of the time is for dumps that events need

	// Audits take at most 1/auditShare of the time, unless their interval was
	// configured, but come at least each auditMost.
	auditShare = 30_000
	auditMost  = 10 * time.Minute

	retryFirst = 100 * time.Millisecond
	retryMost  = 10 * time.Second

	// The first dump, and one after a loss, are audited soon: they can miss a row if
	// there are more than fit a message, and the effect of a call whose event was lost
	// or whose hook was not yet attached when it began.
	firstAudit = time.Second

	// Dumping bound sockets costs twenty times as much as the rest (it walks the
	// hash of all ports), so it is done at each tenth poll, and at each tenth audit
	// unless their interval was configured.
	boundPolls  = 10
	boundAudits = 10
)

// checkDelays are when a socket is looked at after it began to connect.
func checkDelays() []time.Duration {
	return []time.Duration{time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond}
}

// job is a dump to be made now.
type job struct {
	scope   scope
	replace bool // end with Replace
	polled  scope
	audited scope
	resolve scope
}

// planDump plans a dump that an event needs.
func (e *engine) planDump(s scope, at time.Time) {
	if at.Before(e.notBefore) {
		at = e.notBefore
	}
	e.resolve |= s
	if was := e.plan.At(planResolve); was.IsZero() || at.Before(was) {
		e.plan.Set(planResolve, at)
		e.dumpWanted.Notify()
	}
}

// due returns what is to be done now, or when to look again (zero: when notified).
func (e *engine) due(now time.Time) (j job, next time.Time) {
	if retry := e.plan.At(planRetry); retry.After(now) {
		return job{}, retry
	}
	everything := job{scope: scopeAll, replace: true}
	if !e.live || e.stale {
		return everything, time.Time{}
	}
	if e.plan.Due(planCheck, now) {
		e.checkDrops()
		e.plan.Set(planCheck, now.Add(e.audit))
	}
	if e.resync && !e.notBefore.After(now) {
		return everything, time.Time{}
	}
	if e.plan.Due(planResolve, now) {
		j.resolve = e.resolve
	}
	if e.plan.Due(planPoll, now) {
		j.polled = e.polled
		if e.polls+1 < boundPolls && e.polled != scopeTCPBound {
			j.polled &^= scopeTCPBound
		}
	}
	if e.plan.Due(planAudit, now) {
		j.audited = scopeAll &^ e.polled
		if e.paced && e.audits+1 < boundAudits && j.audited != scopeTCPBound {
			j.audited &^= scopeTCPBound
		}
	}
	j.scope = j.polled | j.resolve | j.audited
	next = e.plan.Next()
	if e.resync && (next.IsZero() || e.notBefore.Before(next)) {
		next = e.notBefore
	}
	return j, next
}

// dumps makes the dumps that are due, until ctx ends or the source breaks.
func (e *engine) dumps(ctx context.Context) error {
	for ctx.Err() == nil {
		e.mu.Lock()
		j, next := e.due(time.Now())
		e.mu.Unlock()
		if j.scope == 0 {
			_ = schedule.Wait(ctx, next, e.dumpWanted)
			continue
		}
		if err := e.run(ctx, j); err != nil {
			return err
		}
	}
	return nil
}

// run makes one dump and merges it. Its error is one of the source; a failed
// dump is reported to the handler and tried again.
func (e *engine) run(ctx context.Context, j job) error {
	gated, err := e.begin(&j)
	if err != nil {
		return err
	}
	var cost time.Duration // without the handler's time, which must not delay other dumps
	dump := func() ([]row, scope, error) {
		start := time.Now()
		defer func() { cost += time.Since(start) }()
		return e.dump(ctx, j.scope)
	}
	rows, covered, dumpErr := dump()
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
			rows, covered, dumpErr = dump()
		}
	}

	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.model.end()
	e.counters.dumpTime.Add(int64(cost))
	// The lock was held while records were waited for.
	cost += e.waited
	if !e.resync || j.replace { // a loss waits for no longer than it did
		e.notBefore = time.Now().Add(schedule.Rest(cost, dumpShare))
	}
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
	e.merged(j, e.model.expire(covered, changes))
	e.finish(j, covered, len(rows))
	if gated {
		e.source.open(!e.trackAll())
	}
	e.planNext(j, cost)
	return nil
}

// begin starts a dump, which also answers what events asked for until here. It reports
// whether it lets the hooks report the end of sockets that they do not track.
func (e *engine) begin(j *job) (gated bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.waited = 0
	lost := e.resync
	if j.replace {
		more, err := e.prepareReplace()
		if err != nil {
			return false, err
		}
		lost = lost || more
	}
	// What events ask for from here on needs another dump.
	if j.scope&e.resolve == e.resolve {
		j.resolve |= e.resolve
		e.resolve = 0
		e.plan.Cancel(planResolve)
	}
	e.model.begin()
	e.trustRecent(!lost)
	gated = e.source != nil && j.scope&(scopeTCPBound|scopeUDP) != 0
	if gated {
		e.source.open(true)
	}
	return gated, nil
}

// prepareReplace applies the events that are older than the dump. The event that
// would have corrected them can be lost, so they must not count as newer. A loss
// from here on needs another dump. It reports whether events were lost until here.
func (e *engine) prepareReplace() (lost bool, err error) {
	e.resync = false
	if e.source == nil {
		return false, nil
	}
	if err := e.drain(); err != nil {
		return false, err
	}
	return e.countDrops() || e.resync, nil
}

// trustRecent has the last events decide their sockets as those during the dump do,
// because the dump may not show what they reported. After a loss they may be outdated,
// and the dump decides.
func (e *engine) trustRecent(trust bool) {
	if !trust {
		e.recent.clear()
		return
	}
	e.recent.each(time.Since(e.started), func(cookie uint64) {
		// Only a dump tells whether these have a peer, and what polled ones do since.
		_, connecting := e.model.connecting[cookie]
		en := e.model.sockets[cookie]
		if connecting || en != nil && scopeOf(&en.socket)&e.polled != 0 {
			return
		}
		e.model.touch(cookie)
	})
}

// merge takes in the rows of a first dump and returns how many sockets it misses.
func (e *engine) merge(j job, rows []row, covered scope) (absent int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.drain(); err != nil {
		return 0, err
	}
	e.merged(j, e.model.merge(rows, nil))
	return e.model.absent(covered), nil
}

// merged reports what a dump changed, and counts the changes that events missed
// without a known loss.
func (e *engine) merged(j job, changes []Event) {
	drift, some := uint64(0), []string(nil)
	asked := j.resolve | e.resolve // for a dump, by events
	for i := range changes {
		s := &changes[i].Socket
		if of := scopeOf(s); e.live && !e.resync && j.audited&of != 0 && asked&of == 0 && s.Observed == 0 {
			if drift++; drift <= driftShown {
				some = append(some, changes[i].summary())
			}
		}
		if changes[i].Gone && e.source != nil {
			e.source.untrack(s.Cookie)
		}
	}
	if drift > 0 {
		e.counters.drift.Add(drift)
		e.log.Warn("audit repaired sockets that events missed", "sockets", drift, "some", some)
	}
	e.reportDumped(changes)
}

// driftShown is how many of the sockets that an audit repaired are in the log.
const driftShown = 8

func (e *Event) summary() string {
	state := "bound"
	switch {
	case e.Gone:
		state = "gone"
	case e.Socket.Listening:
		state = "listening"
	}
	return fmt.Sprintf("%v %v %s, cookie %d;", e.Socket.Protocol, netip.AddrPortFrom(e.Socket.Address, e.Socket.Port), state, e.Socket.Cookie)
}

// finish ends what waited for this dump, and replaces the set if that is due.
func (e *engine) finish(j job, covered scope, rows int) {
	if e.stale {
		e.log.Info("dumping sockets works again")
	}
	e.plan.Cancel(planRetry)
	e.backoff.Reset()
	if j.replace {
		e.replace(covered, rows)
	}
	if e.owners != nil {
		e.ownersWanted.Notify()
	}
	if e.resolve != 0 {
		return // more has come
	}
	if waiting := e.model.waiting(); waiting != 0 {
		if delays := checkDelays(); e.checks+1 < len(delays) {
			e.checks++
			e.planDump(waiting, time.Now().Add(delays[e.checks]))
			return
		}
	}
	e.checks = 0
	e.model.forgetWaiting() // the audit will see them
}

// replace gives the handler the complete set.
func (e *engine) replace(covered scope, rows int) {
	if e.live && !e.stale {
		e.counters.resyncs.Add(1)
		// The hooks may have forgotten a socket whose event was lost, and so may be its owner's.
		for cookie, en := range e.model.sockets {
			en.tracked = false
			e.model.fresh[cookie] = time.Now()
		}
		e.planLook()
		if covered&scopeTCPBound == 0 {
			// Nothing can tell which of these still exist.
			e.forgetBound()
		}
	}
	e.live, e.stale = true, false
	e.counters.sockets.Store(int64(len(e.model.sockets)))
	clear(e.pending) // they are in the set
	e.handler.Replace(e.model.all())
	e.log.Debug("sockets dumped", "sockets", len(e.model.sockets), "rows", rows)
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
	e.reportDumped(gone)
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

// failed reports that a dump failed and plans the next try.
func (e *engine) failed(j job, err error) {
	e.counters.dumpFailures.Add(1)
	if j.replace && e.live && !e.stale {
		e.resync = true
	}
	e.plan.Set(planRetry, time.Now().Add(e.backoff.Next()))
	if !e.stale {
		e.log.Error("dumping sockets failed; the known state may be outdated", "err", err)
	}
	e.stale = true
	e.handler.Stale(fmt.Errorf("observer: %w", err))
}

// planNext plans the next dumps after one that took cost and succeeded.
func (e *engine) planNext(j job, cost time.Duration) {
	now := time.Now()
	switch {
	case e.polled == 0 || !j.replace && j.polled == 0:
	case e.polled == scopeTCPBound:
		e.plan.Set(planPoll, now.Add(boundPolls*e.interval))
	default:
		e.plan.Set(planPoll, now.Add(e.interval))
		if e.polls++; j.scope&scopeTCPBound != 0 {
			e.polls = 0
		}
	}
	if e.source == nil || !j.replace && j.audited == 0 {
		return
	}
	switch {
	case j.replace:
		e.audits = boundAudits // the first audit after it has all
	case j.audited&scopeTCPBound != 0:
		e.audits = 0
	default:
		e.audits++
	}
	e.planAudit(j, now, cost)
	e.checkDrops()
}

// planAudit plans the next audit after a dump that took cost.
func (e *engine) planAudit(j job, now time.Time, cost time.Duration) {
	switch {
	case e.polled == scopeAll:
		e.plan.Cancel(planAudit)
	case j.replace:
		e.plan.Set(planAudit, now.Add(firstAudit))
	case e.audit < 0:
		e.plan.Cancel(planAudit)
	default:
		e.plan.Set(planAudit, e.nextAudit(now, cost))
		if e.paced {
			e.plan.Set(planCheck, now.Add(e.audit))
		}
	}
}

// nextAudit returns when to audit again after an audit that took cost, zero for never.
func (e *engine) nextAudit(now time.Time, cost time.Duration) time.Time {
	switch {
	case e.audit < 0:
		return time.Time{}
	case e.paced:
		return now.Add(max(e.audit, min(schedule.Rest(cost, auditShare), auditMost)))
	}
	return now.Add(e.audit)
}
