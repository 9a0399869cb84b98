// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	ownerPause = time.Second // at least, between searches of /proc
	ownerShare = 20          // at most 1/20 of a processor is for them
)

// findOwners searches for the processes of sockets that only a dump knew, and of those
// that searchOwner asked for, until ctx ends. Searches are paced, however many sockets
// there are.
func (e *engine) findOwners(ctx context.Context) {
	for schedule.Wait(ctx, time.Time{}, e.ownersWanted) == nil {
		if wanted := e.ownerless(); len(wanted) > 0 {
			e.sweep(ctx, wanted)
		}
	}
}

// sweep searches all of /proc for the processes of sockets, by as many searches as
// that takes.
func (e *engine) sweep(ctx context.Context, wanted []Socket) {
	denied, next := false, uint32(0)
	for len(wanted) > 0 && ctx.Err() == nil {
		if e.acquire(ctx) != nil {
			return
		}
		seen := Now()
		found, pause := e.search(ctx, wanted, next)
		<-e.searching
		next, denied = found.next, denied || found.denied
		wanted = e.setOwners(wanted, found.owners, seen)
		if next == 0 {
			e.sought(wanted, !denied)
			wanted = nil
		}
		_ = schedule.Sleep(ctx, pause)
	}
}

// acquire waits for the right to search. Receiving from e.searching gives it back.
func (e *engine) acquire(ctx context.Context) error {
	select {
	case e.searching <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// search returns the processes of sockets as far as it found them, and how long to
// pause before the next search. The pause depends on the time of a processor that
// the search took, because that of the clock is long on a busy machine.
func (e *engine) search(ctx context.Context, wanted []Socket, from uint32) (findings, time.Duration) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := threadTime()
	found := e.owners(ctx, wanted, from)
	return found, max(ownerPause, schedule.Rest(threadTime()-start, ownerShare))
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
// and those that searchOwner asked for.
func (e *engine) ownerless() []Socket {
	e.mu.Lock()
	defer e.mu.Unlock()
	requested := e.takeRequested()
	var wanted []Socket
	for cookie, en := range e.model.sockets {
		_, asked := requested[cookie]
		if asked || en.unowned() && en.searches == 0 {
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
		en.partial, en.searches = 0, max(en.searches, 1)
		en.socket.Sought, en.socket.Observed = true, 0
		changes = append(changes, Event{Socket: en.socket})
	}
	e.reportDumped(changes)
}

// checkOwners searches for the processes of sockets whose process has ended, and
// reports those that it found before it returns. A socket that no process is found
// for keeps its old one.
func (e *engine) checkOwners(ctx context.Context) {
	if e.acquire(ctx) != nil {
		return
	}
	defer func() { <-e.searching }()
	if e.owners == nil || time.Now().Before(e.nextSearch) {
		return
	}
	seen := Now()
	wanted := e.abandoned()
	if len(wanted) == 0 {
		return
	}
	from := e.nextPID
	found, pause := e.search(ctx, wanted, from)
	e.nextSearch, e.nextPID = time.Now().Add(pause), found.next
	missing := e.setOwners(wanted, found.owners, seen)
	if found.next == 0 && ctx.Err() == nil {
		e.countSearch(missing)
	}
}

// countSearch counts a search in vain that came to the end of /proc, whatever it was
// allowed to read.
func (e *engine) countSearch(missing []Socket) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range missing {
		if en := e.current(&missing[i]); en != nil && en.unowned() {
			en.searches++
		}
	}
}

// maxSearches bounds the searches for the owner of a socket that may have none, as
// those of the kernel. One search can miss an owner: a process hands the socket to
// another one that was read before, and ends.
const maxSearches = 3

func (en *entry) unowned() bool { return en.socket.PID == 0 && en.socket.Comm == "" }

// abandoned returns the sockets whose process has ended, and those whose process was
// searched for only a few times in vain.
func (e *engine) abandoned() []Socket {
	var list, unowned []Socket
	e.mu.Lock()
	for _, en := range e.model.sockets {
		switch {
		case !en.unowned():
			list = append(list, en.socket)
		case en.searches > 0 && en.searches < maxSearches:
			unowned = append(unowned, en.socket)
		}
	}
	e.mu.Unlock()
	// A process that has not ended since the first time it was seen, never has.
	first := make(map[uint32]int64)
	for i := range list {
		s := &list[i]
		if seen, ok := first[s.PID]; !ok || s.PIDSeen < seen {
			first[s.PID] = s.PIDSeen
		}
	}
	lives := make(map[uint32]bool)
	for pid, seen := range first {
		lives[pid] = pid == 0 || !e.ended(pid, seen)
	}
	list = slices.DeleteFunc(list, func(s Socket) bool { return lives[s.PID] || !e.ended(s.PID, s.PIDSeen) })
	return append(list, unowned...)
}
