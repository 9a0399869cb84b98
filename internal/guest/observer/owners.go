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
// their sockets and names. Searches are paced, however many sockets there are.
func (e *engine) findOwners(ctx context.Context) {
	if e.owners == nil {
		return
	}
	audit := e.nextAudit(time.Now(), 0)
	for schedule.Wait(ctx, audit, e.ownersWanted) == nil {
		all := !audit.IsZero() && !time.Now().Before(audit)
		cost := e.lookAtOwners(ctx, all)
		if wanted := e.ownerless(all); len(wanted) > 0 {
			cost += e.sweep(ctx, wanted)
		}
		if all {
			audit = e.nextAudit(time.Now(), cost)
		}
	}
}

// sweep searches all of /proc for the processes of sockets, by as many searches as
// that takes. It returns what they cost.
func (e *engine) sweep(ctx context.Context, wanted []Socket) (cost time.Duration) {
	denied, next := false, uint32(0)
	for len(wanted) > 0 && ctx.Err() == nil {
		seen := Now()
		var found findings
		took := measured(func() { found = e.owners(ctx, wanted, next) })
		cost += took
		next, denied = found.next, denied || found.denied
		wanted = e.setOwners(wanted, found.owners, seen)
		if next == 0 {
			e.sought(wanted, !denied)
			wanted = nil
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
			continue
		}
		o, ok := found[sockets[i].Cookie]
		switch {
		case !ok:
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

// ownerless returns the sockets whose process is neither known nor was searched for,
// and those that searchOwner asked for. An audit tries again what was in vain.
func (e *engine) ownerless(audit bool) []Socket {
	e.mu.Lock()
	defer e.mu.Unlock()
	requested := e.takeRequested()
	var wanted []Socket
	for cookie, en := range e.model.sockets {
		_, asked := requested[cookie]
		if asked || en.unowned() && (en.searches == 0 || audit && en.searches < maxSearches) {
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
// CLOCK_MONOTONIC, in nanoseconds, and returns the sockets for which it found none.
func (e *engine) setOwners(wanted []Socket, found map[uint64]owner, seen int64) (missing []Socket) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var changes []Event
	for i := range wanted {
		o, ok := found[wanted[i].Cookie]
		if !ok {
			missing = append(missing, wanted[i])
			continue
		}
		if en := e.current(&wanted[i]); en != nil {
			en.socket.takeProcess(&Socket{PID: o.pid, Comm: o.comm, PIDSeen: seen})
			en.socket.Observed, en.socket.Sought, en.partial = 0, false, 0
			e.model.fresh[en.socket.Cookie] = time.Now()
			changes = append(changes, Event{Socket: en.socket})
		}
	}
	e.reportDumped(changes)
	return missing
}

// sought notes the sockets for which all of /proc was searched in vain. If it could not
// be read in full, the search is repeated. An agent without root's rights never reads
// all, so that ends after maxSearches: rules wait for the search.
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
		changes = append(changes, Event{Socket: en.socket})
	}
	e.reportDumped(changes)
}

// maxSearches bounds the searches for the owner of a socket that may have none, as
// those of the kernel. One search can miss an owner: a process hands the socket to
// another one that was read before, and ends.
const maxSearches = 3

func (en *entry) unowned() bool { return en.socket.PID == 0 && en.socket.Comm == "" }
