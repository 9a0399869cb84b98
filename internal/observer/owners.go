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

// findOwners searches for the processes of sockets that only a dump knew, until
// ctx ends. Searches are paced, however many sockets there are.
func (e *engine) findOwners(ctx context.Context) {
	for schedule.Wait(ctx, time.Time{}, e.ownersWanted) == nil {
		wanted := e.ownerless()
		if len(wanted) == 0 {
			continue
		}
		e.searching.Lock()
		seen := monotonicNow()
		found, pause := e.search(ctx, wanted)
		e.searching.Unlock()
		e.setOwners(wanted, found, seen)
		_ = schedule.Sleep(ctx, pause)
	}
}

// search returns the processes of sockets as far as it found them, and how long to
// pause before the next search. The pause depends on the time of a processor that
// the search took, because that of the clock is long on a busy machine.
func (e *engine) search(ctx context.Context, wanted []Socket) (map[uint64]owner, time.Duration) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := threadTime()
	found := e.owners(ctx, wanted)
	return found, max(ownerPause, schedule.Rest(threadTime()-start, ownerShare))
}

// ownerless returns the sockets whose process is neither known nor was searched for.
func (e *engine) ownerless() []Socket {
	e.mu.Lock()
	defer e.mu.Unlock()
	var wanted []Socket
	for _, en := range e.model.sockets {
		if en.unowned() && en.searches == 0 {
			en.searches++
			wanted = append(wanted, en.socket)
		}
	}
	slices.SortFunc(wanted, func(a, b Socket) int { return cmp.Compare(a.Cookie, b.Cookie) })
	return wanted
}

// setOwners notes the processes that a search found, which began at the time
// seen of CLOCK_MONOTONIC, in nanoseconds, and for which sockets it found none.
func (e *engine) setOwners(wanted []Socket, found map[uint64]owner, seen int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var changes []Event
	for i := range wanted {
		o, ok := found[wanted[i].Cookie]
		en := e.model.sockets[wanted[i].Cookie]
		if en == nil || !en.unowned() {
			continue
		}
		if en.socket.Sought = !ok; ok {
			en.socket.PID, en.socket.Comm, en.socket.PIDSeen = o.pid, o.comm, seen
		}
		changes = append(changes, Event{Socket: en.socket})
	}
	e.reportDumped(changes)
}

// checkOwners searches for the processes of sockets whose process has ended, and
// reports those that it found before it returns. A socket that no process is found
// for keeps its old one.
func (e *engine) checkOwners(ctx context.Context) {
	e.searching.Lock()
	defer e.searching.Unlock()
	if e.owners == nil || time.Now().Before(e.nextSearch) {
		return
	}
	seen := monotonicNow()
	wanted := e.abandoned()
	if len(wanted) == 0 {
		return
	}
	found, pause := e.search(ctx, wanted)
	e.nextSearch = time.Now().Add(pause)
	complete := ctx.Err() == nil

	e.mu.Lock()
	defer e.mu.Unlock()
	var changes []Event
	for i := range wanted {
		old := &wanted[i]
		o, ok := found[old.Cookie]
		en := e.model.sockets[old.Cookie]
		if en != nil && complete {
			en.searches++
		}
		if !ok || en == nil || en.socket.PID != old.PID || en.socket.PIDSeen != old.PIDSeen {
			continue
		}
		en.socket.PID, en.socket.Comm, en.socket.PIDSeen = o.pid, o.comm, seen
		en.socket.Observed = 0
		changes = append(changes, Event{Socket: en.socket})
	}
	e.reportDumped(changes)
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
