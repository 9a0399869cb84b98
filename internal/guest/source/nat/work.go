// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"context"
	"errors"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/nat/compile"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/guest/source/nat/watch"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	restMin        = 100 * time.Microsecond
	restMax        = 5 * time.Second
	readShare      = 10                    // reading takes at most one part in so many of the time
	applyShare     = 4                     // and applying commits one part in so many,
	applyBurst     = 20 * time.Millisecond // of which this much may come at once
	auditShare     = 30_000                // and audits one part in so many
	auditMost      = 30 * time.Minute      // between two audits, whatever they cost
	legacyShare    = 200                   // and polling legacy tables one part in so many
	legacyMost     = 30 * time.Second      // between two polls, whatever they cost
	generationPoll = time.Second           // of the last method for nftables
	absentPoll     = 30 * time.Second      // for nftables in a kernel without it
	ownedPoll      = 10 * time.Second      // of tables that vanish with their owner, unreported
	orderPause     = 10 * time.Millisecond // between readings of an order that commits overtake
	orderAttempts  = 10                    // of them
	guessDelay     = time.Second / 2       // until an order that may be guessed wrong is audited
	dumpAttempts   = 20                    // of a dump that a commit overtook
	retryMin       = 200 * time.Millisecond
	retryMax       = 6400 * time.Millisecond
)

// rest returns when work that took cost may be done again.
func rest(cost time.Duration) time.Time {
	return time.Now().Add(min(max(schedule.Rest(cost, readShare), restMin), restMax))
}

// load holds the work of applying commits to one part in applyShare of the time,
// and lets short bursts pass at once.
type load struct{ idle time.Time } // when the work so far is made good for

// add accounts for work and returns when there may be more.
func (l *load) add(began, ended time.Time) time.Time {
	if l.idle.Before(began) {
		l.idle = began
	}
	l.idle = l.idle.Add(min(ended.Sub(began)*applyShare, restMax))
	return l.idle.Add(-applyBurst)
}

// work does what is due.
func (x *session) work(ctx context.Context) {
	now := time.Now()
	if x.due.Take(checkGeneration, now) {
		x.checkGeneration(now)
	}
	if x.due.Take(checkOwned, now) {
		x.checkOwned()
	}
	compare := x.due.Take(audit, now)
	if compare {
		x.due.Set(audit, now.Add(x.s.opt.Audit))
	}
	if x.due.Take(auditLegacy, now) || compare {
		x.due.Set(auditLegacy, now.Add(x.s.opt.Audit))
		x.plan(readLegacy)
	}
	switch apply, again := x.due.Take(applyCommits, now), x.due.Take(readOrder, now); {
	case x.planned(dump): // which has all that
	case apply:
		x.applyPending()
	case again:
		x.settle(now)
	}
	switch {
	case x.due.Take(dump, now):
		x.readDump(ctx)
	case compare && now.Before(x.rested[dump]):
		x.due.Set(audit, x.rested[dump])
	case compare && !x.settled():
		next := now.Add(orderPause)
		if at := x.due.At(readOrder); at.After(next) {
			next = at
		}
		x.due.Set(audit, next)
	case compare && !x.planned(dump):
		x.auditDump(ctx)
	}
	if x.due.Take(readLegacy, now) {
		x.readLegacy()
	}
	x.pollOwned()
}

// pollGeneration plans the next look at the generation, if nothing reports commits.
func (x *session) pollGeneration(now time.Time) {
	switch {
	case x.absent:
		x.due.Set(checkGeneration, now.Add(absentPoll))
	case x.in.polled():
		x.due.Set(checkGeneration, now.Add(generationPoll))
	default:
		x.due.Cancel(checkGeneration)
	}
}

// checkGeneration plans a dump if there was a commit, or if there may be nftables now.
func (x *session) checkGeneration(now time.Time) {
	if x.absent {
		if x.in.polled() { // it may only have lacked a module
			_ = x.watch()
			x.sayMethod()
		}
		x.plan(dump)
	}
	x.pollGeneration(now)
	if x.planned(dump) {
		return
	}
	if gen, err := x.sys.Generation(); err != nil || gen != x.m.Generation() {
		x.plan(dump)
	}
}

// pollOwned plans the next look at tables that vanish with their owner.
func (x *session) pollOwned() {
	switch owned := len(x.c.OwnedTables()) > 0; {
	case !owned:
		x.due.Cancel(checkOwned)
	case !x.planned(checkOwned):
		x.due.Set(checkOwned, time.Now().Add(ownedPoll))
	}
}

func (x *session) checkOwned() {
	for _, id := range x.c.OwnedTables() {
		if exists, err := x.sys.Exists(id); err != nil || !exists {
			x.plan(dump)
		}
	}
}

// readHost takes over the links and routes. After a failure the next change is awaited.
func (x *session) readHost() {
	net, err := x.sys.Network()
	if err != nil {
		x.fail(partHost, err)
		return
	}
	x.c.SetHost(hostOf(&net))
	x.done(partHost)
}

// applyPending applies all commits that were received, as one step.
func (x *session) applyPending() {
	began := time.Now()
	commits, err := x.apply()
	switch {
	case errors.Is(err, compile.ErrNotRead):
		x.dumpInstead()
		return
	case err != nil:
		x.lost(err)
		return
	}
	x.count(func(st *Status) { st.Commits += commits })
	x.settle(began)
}

// settle states what the commits that were applied have changed, after it has read
// the order of rules that they left open. began is when this work began.
func (x *session) settle(began time.Time) {
	defer func() { x.rested[applyCommits] = x.load.add(began, time.Now()) }()
	reading := time.Now()
	err := x.readOrder()
	read := time.Now()
	switch {
	case err != nil:
		x.lost(err)
		return
	case !x.settled():
		x.due.Set(readOrder, read.Add(max(orderPause, min(read.Sub(reading)*applyShare, restMax))))
		return
	}
	x.due.Cancel(readOrder)
	x.reads = 0
	x.commit()
}

// readOrder reads the chains whose order is open. If a reading lacks rules, a commit
// that deletes them is on its way and is awaited. That ends: after some readings, and
// when all commits that were received are applied, the places of these rules are guessed.
func (x *session) readOrder() error {
	open := x.m.Unordered()
	if len(open) == 0 {
		return nil
	}
	x.reads++
	waits := len(x.in.pending) > 0 && x.planned(applyCommits)
	for _, id := range open {
		rules, err := x.sys.Rules(id)
		moved := errors.Is(err, watch.ErrMoved)
		if err != nil && !moved {
			return err
		}
		if x.m.Order(id, rules, false) || x.reads < orderAttempts || waits {
			continue
		}
		x.s.log.Debug("guessed the places of rules that are not there any more",
			"table", id.Table.String(), "chain", id.Name, "overtaken", moved)
		x.m.Order(id, rules, true)
		if moved { // so that the kernel may still have rules that the reading lacks
			x.due.Advance(audit, time.Now().Add(guessDelay))
		}
	}
	return nil
}

// apply applies the pending commits to the model and returns how many there were.
func (x *session) apply() (commits uint64, err error) {
	pending := x.in.after(x.m.Generation())
	from := 0
	for i, m := range pending {
		if m.Type != ruleset.MsgNewGen {
			continue
		}
		if err := x.m.Commit(pending[from:i], m.Generation); err != nil {
			x.half = true
			return 0, err
		}
		from = i + 1
		commits++
	}
	x.in.applied()
	return commits, nil
}

// readDump makes the model equal to a dump.
func (x *session) readDump(ctx context.Context) {
	began := time.Now()
	snap, err := x.dump(ctx)
	if ctx.Err() != nil {
		return
	}
	x.rested[dump] = rest(time.Since(began))
	x.absent = errors.Is(err, watch.ErrAbsent)
	switch {
	case x.absent:
		snap = &ruleset.Snapshot{}
	case err != nil:
		if again := x.fail(partNFT, err); again.After(x.rested[dump]) {
			x.rested[dump] = again
		}
		x.plan(dump)
		return
	}
	x.pollGeneration(time.Now())
	x.takeOver(snap)
	x.done(partNFT)
	if len(x.in.pending) > 0 {
		x.plan(applyCommits)
	}
}

// takeOver makes the model equal to a dump and returns what differed.
func (x *session) takeOver(snap *ruleset.Snapshot) compile.Differences {
	x.half, x.reads = false, 0
	x.due.Cancel(readOrder)
	return x.m.Load(snap)
}

// dump reads the ruleset until no commit overtakes the reading.
func (x *session) dump(ctx context.Context) (*ruleset.Snapshot, error) {
	var snap *ruleset.Snapshot
	err := watch.ErrMoved
	for try := 0; try < dumpAttempts && errors.Is(err, watch.ErrMoved) && ctx.Err() == nil; try++ {
		snap, err = x.dumpOnce(ctx)
	}
	return snap, err
}

func (x *session) dumpOnce(ctx context.Context) (*ruleset.Snapshot, error) {
	x.count(func(st *Status) { st.Dumps++ })
	return x.sys.Dump(ctx)
}

// auditDump compares the model with a dump, unless there was a commit meanwhile.
func (x *session) auditDump(ctx context.Context) {
	began := time.Now()
	snap, err := x.dumpOnce(ctx)
	if ctx.Err() != nil {
		return
	}
	took := time.Since(began)
	x.rested[dump] = rest(took)
	switch {
	case errors.Is(err, watch.ErrAbsent):
		x.plan(dump)
		return
	case errors.Is(err, watch.ErrMoved), err == nil && !x.in.covers(x.m.Generation(), snap.Generation):
		x.due.Set(audit, x.rested[dump]) // notifications of a commit are on their way
		return
	case err != nil:
		if again := x.fail(partNFT, err); again.After(x.rested[dump]) {
			x.rested[dump] = again
		}
		x.plan(dump)
		return
	}
	if d := x.takeOver(snap); d.Count > 0 {
		x.s.log.Warn("the model differed from the kernel's ruleset and was corrected",
			"generation", snap.Generation, "objects", d.Count, "first", d.First)
		x.count(func(st *Status) { st.Drift += uint64(d.Count) })
	}
	x.done(partNFT)
	if opt := x.s.opt; opt.paced {
		x.due.Set(audit, time.Now().Add(max(opt.Audit, min(schedule.Rest(took, auditShare), auditMost))))
	}
}

// readLegacy reads the legacy tables, if there are any.
func (x *session) readLegacy() {
	began := time.Now()
	err := x.loadLegacy()
	took := time.Since(began)
	x.rested[readLegacy] = rest(took)
	if err != nil {
		if again := x.fail(partLegacy, err); again.After(x.rested[readLegacy]) {
			x.rested[readLegacy] = again
		}
		x.plan(readLegacy)
		return
	}
	x.done(partLegacy)
	if x.wake != nil {
		return
	}
	// A single slow read, as on a busy machine, does not count in full, and slow reads
	// never stop the polling.
	x.legacyCost = min(took, max(2*x.legacyCost, restMin))
	pause := max(x.s.opt.LegacyPoll, min(schedule.Rest(x.legacyCost, legacyShare), legacyMost))
	x.due.Advance(readLegacy, time.Now().Add(pause))
}

// loadLegacy makes the model of the legacy tables equal to what the kernel has.
func (x *session) loadLegacy() error {
	v4, v6, err := x.sys.LegacyTables()
	if err != nil {
		return err
	}
	for _, f := range []struct {
		family uint8
		exists bool
	}{{ruleset.FamilyIP, v4}, {ruleset.FamilyIP6, v6}} {
		snap := &ruleset.Snapshot{}
		if f.exists {
			t, err := x.sys.Legacy(f.family == ruleset.FamilyIP6)
			if err != nil {
				return err
			}
			snap.Tables = []*ruleset.Table{t}
			x.count(func(st *Status) { st.LegacyReads++ })
		}
		x.c.Sync(snap, func(id ruleset.TableID) bool { return id.Legacy && id.Family == f.family })
	}
	return nil
}
