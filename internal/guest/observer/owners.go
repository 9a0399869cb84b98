// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	ownerPause = time.Second // at least, between searches of /proc
	ownerShare = 20          // at most 1/20 of a processor is for them

	// A socket whose process is new is looked at after this time: most of those that are
	// handed on are so at once, as by a daemon that forks. Later that is seen when the
	// process ends, or by an audit.
	ownerSettle = time.Second
)

// findOwners searches for the processes of sockets that only a dump knew, and of those
// that searchOwner asked for, until ctx ends. It also looks whether processes still have
// their sockets and names; audits do so, and each tenth, unless their interval was configured,
// searches for all. Searches are paced, however many sockets there are.
func (e *engine) findOwners(ctx context.Context) {
	if e.owners == nil {
		return
	}
	audit, audits, share := e.nextAudit(time.Now(), 0), 0, time.Duration(0)
	for schedule.Wait(ctx, audit, e.ownersWanted) == nil {
		all := !audit.IsZero() && !time.Now().Before(audit)
		every := all && (!e.paced || audits%boundAudits == 0)
		cost := e.lookAtOwners(ctx, all)
		swept := e.sweep(ctx, e.wanted(all, every))
		if every {
			share = swept / boundAudits
		}
		if all {
			audits++
			audit = e.nextAudit(time.Now(), cost+share)
		}
	}
}

// sweep searches all of /proc for the processes of sockets, by as many searches as
// that takes. It returns what they cost.
func (e *engine) sweep(ctx context.Context, wanted []Socket) (cost time.Duration) {
	best := make(map[uint64]owner, len(wanted))
	denied, next := false, uint32(0)
	for more := len(wanted) > 0; more && ctx.Err() == nil; more = next != 0 {
		seen := Now()
		var found findings
		took := measured(func() { found = e.owners(ctx, wanted, next) })
		cost += took
		next, denied = found.next, denied || found.denied
		for cookie, o := range found.owners {
			if old, ok := best[cookie]; ok && !o.before(old) {
				delete(found.owners, cookie)
			} else {
				best[cookie] = o
			}
		}
		e.setOwners(wanted, found.owners, seen)
		if next == 0 {
			wanted = slices.DeleteFunc(wanted, func(s Socket) bool { _, ok := best[s.Cookie]; return ok })
			e.sought(wanted, !denied)
		}
		_ = schedule.Sleep(ctx, max(ownerPause, schedule.Rest(took, ownerShare)))
	}
	return cost
}

// measured returns the time of a processor that f takes: that of the clock is long on a
// busy machine.
func measured(f func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := threadTime()
	f()
	return threadTime() - start
}

// lookAtOwners looks whether processes still have their sockets and names: those that have
// had time to hand them on, or all. It has those searched for that do not, and returns what
// it cost.
func (e *engine) lookAtOwners(ctx context.Context, all bool) (cost time.Duration) {
	e.mu.Lock()
	due := e.holders != nil && (all || !e.lookAt.IsZero() && !time.Now().Before(e.lookAt))
	e.mu.Unlock()
	if !due {
		return 0
	}
	sockets, pids := e.owned(all)
	if len(sockets) > 0 {
		cost = measured(func() {
			if e.exits != nil {
				e.exits.retain(pids)
				for i := range sockets {
					e.exits.watch(sockets[i].PID)
				}
			}
			e.held(sockets, e.holders(ctx, sockets))
		})
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lookAt, e.lookFrom = time.Time{}, time.Now().Add(max(ownerPause, schedule.Rest(cost, ownerShare)))
	e.planLook()
	return cost
}

// owned returns the sockets to look at whose process has a number here, and all processes
// that have sockets.
func (e *engine) owned(all bool) (sockets []Socket, pids map[uint32]struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	pids = make(map[uint32]struct{})
	for cookie, en := range e.model.sockets {
		since, fresh := e.model.fresh[cookie]
		settled := fresh && now.Sub(since) >= ownerSettle
		if settled {
			delete(e.model.fresh, cookie)
		}
		if en.socket.PID == 0 {
			continue
		}
		pids[en.socket.PID] = struct{}{}
		if all || settled {
			sockets = append(sockets, en.socket)
		}
	}
	return sockets, pids
}

// planLook plans a look at sockets whose process is new, if there are any. It needs e.mu.
func (e *engine) planLook() {
	if len(e.model.fresh) == 0 || e.holders == nil || !e.lookAt.IsZero() {
		return
	}
	first := time.Now()
	for _, since := range e.model.fresh {
		if since.Before(first) {
			first = since
		}
	}
	if e.lookAt = first.Add(ownerSettle); e.lookAt.Before(e.lookFrom) {
		e.lookAt = e.lookFrom
	}
	time.AfterFunc(time.Until(e.lookAt), e.ownersWanted.Notify)
}

// held notes the names that processes have now, and has those searched for that do not
// have their socket any more.
func (e *engine) held(sockets []Socket, found map[uint64]owner) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var changes []Event
	for i := range sockets {
		en := e.current(&sockets[i])
		if en == nil {
			if e.model.sockets[sockets[i].Cookie] != nil {
				e.model.fresh[sockets[i].Cookie] = time.Now() // it changed meanwhile
			}
			continue
		}
		o, ok := found[sockets[i].Cookie]
		switch {
		case !ok || en.passed:
			en.passed = false
			e.searchOwner(sockets[i].Cookie)
		case o.comm != en.socket.Comm:
			en.socket.Comm, en.socket.Observed = o.comm, 0
			changes = append(changes, Event{Socket: en.socket})
		}
	}
	e.reportDumped(changes)
}

// watchExits has the sockets of processes that end looked at, until ctx ends.
func (e *engine) watchExits(ctx context.Context) error {
	defer context.AfterFunc(ctx, e.exits.stop)()
	for {
		pids, err := e.exits.wait()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("wait for the end of processes: %w", err)
		}
		if err := e.exited(pids); err != nil {
			return err
		}
	}
}

// exited has the processes searched for that have the sockets of those that have ended.
// Most sockets end with their process.
func (e *engine) exited(pids []uint32) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.drain(); err != nil {
		return err
	}
	for cookie, en := range e.model.sockets {
		switch {
		case !slices.Contains(pids, en.socket.PID):
		case scopeOf(&en.socket)&e.polled != 0:
			e.model.fresh[cookie] = time.Now() // when it has been polled
		default:
			e.searchOwner(cookie)
		}
	}
	e.planLook()
	return nil
}

// rename takes in that processes have another name now, or run another program, which may
// not have all sockets: once for a batch, as it walks all sockets. It needs e.mu.
func (e *engine) rename() {
	if len(e.renames) == 0 {
		return
	}
	for cookie, en := range e.model.sockets {
		by, ok := e.renames[en.socket.PID]
		if !ok {
			continue
		}
		e.model.fresh[cookie] = time.Now()
		if en.socket.Comm == by.Comm {
			continue
		}
		en.socket.Comm, en.socket.PIDSeen, en.socket.Observed = by.Comm, by.Observed, by.Observed
		if change := (Event{Socket: en.socket}); !e.isPending(&change) {
			e.batch = append(e.batch, change)
		}
	}
	clear(e.renames)
	e.planLook()
}

// searchOwner implements Observer.SearchOwner.
func (e *engine) searchOwner(cookie uint64) {
	e.requestMu.Lock()
	e.requested[cookie] = struct{}{}
	e.requestMu.Unlock()
	e.ownersWanted.Notify()
}

// takeRequested returns the sockets that searchOwner asked for.
func (e *engine) takeRequested() map[uint64]struct{} {
	e.requestMu.Lock()
	defer e.requestMu.Unlock()
	taken := e.requested
	e.requested = make(map[uint64]struct{})
	return taken
}

// wanted returns the sockets whose process is neither known nor was searched for, and those
// that searchOwner asked for, or every one. An audit tries again what was in vain.
func (e *engine) wanted(audit, every bool) []Socket {
	e.mu.Lock()
	defer e.mu.Unlock()
	requested := e.takeRequested()
	var wanted []Socket
	for cookie, en := range e.model.sockets {
		_, asked := requested[cookie]
		if asked || every || en.unowned() && (en.searches == 0 || audit && en.searches < maxSearches) {
			wanted = append(wanted, en.socket)
		}
	}
	slices.SortFunc(wanted, func(a, b Socket) int { return cmp.Compare(a.Cookie, b.Cookie) })
	return wanted
}

// current returns the entry of a socket whose process is the one that it was, else nil.
func (e *engine) current(old *Socket) *entry {
	en := e.model.sockets[old.Cookie]
	if en == nil || en.socket.PID != old.PID || en.socket.PIDSeen != old.PIDSeen || en.socket.Comm != old.Comm {
		return nil
	}
	return en
}

// setOwners notes the processes that a search found, which began at the time seen of
// CLOCK_MONOTONIC, in nanoseconds, also in wanted.
func (e *engine) setOwners(wanted []Socket, found map[uint64]owner, seen int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var changes []Event
	for i := range wanted {
		o, ok := found[wanted[i].Cookie]
		en := e.current(&wanted[i])
		if !ok || en == nil {
			continue
		}
		s := &en.socket
		en.partial, s.PIDSeen = 0, seen
		if same := s.PID == o.pid && s.Comm == o.comm; !same || !s.Sought {
			if s.Sought, s.Observed = same, 0; !same {
				s.takeProcess(&Socket{PID: o.pid, Comm: o.comm, PIDSeen: seen})
				e.model.fresh[s.Cookie] = time.Now()
			}
			changes = append(changes, Event{Socket: *s})
		}
		wanted[i] = *s
	}
	e.reportDumped(changes)
}

// sought notes the sockets for which all of /proc was searched in vain: nobody has them,
// whoever had. If it could not be read in full, the search is repeated. An agent without
// root's rights never reads all, so that ends after maxSearches: rules wait for the search.
func (e *engine) sought(missing []Socket, complete bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var changes []Event
	for i := range missing {
		en := e.current(&missing[i])
		if en == nil {
			continue
		}
		if en.partial++; !complete && en.partial < maxSearches {
			e.searchOwner(missing[i].Cookie)
			continue
		}
		en.partial, en.searches = 0, min(en.searches+1, maxSearches)
		en.socket.Sought, en.socket.Observed = true, 0
		if complete && en.socket.PID != 0 {
			en.socket.takeProcess(&Socket{})
		}
		changes = append(changes, Event{Socket: en.socket})
	}
	e.reportDumped(changes)
}

// maxSearches bounds the searches for the owner of a socket that may have none, as
// those of the kernel. One search can miss an owner: a process hands the socket to
// another one that was read before, and ends.
const maxSearches = 3

func (en *entry) unowned() bool { return en.socket.PID == 0 && en.socket.Comm == "" }
