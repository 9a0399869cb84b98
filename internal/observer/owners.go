// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	ownerPause = time.Second // at least, between searches of /proc
	ownerShare = 20          // at most 1/20 of the time is for them
)

// findOwners searches for the processes of sockets that only a dump knew, until
// ctx ends. Searches are paced, however many sockets there are.
func (e *engine) findOwners(ctx context.Context) {
	for schedule.Wait(ctx, time.Time{}, e.ownersWanted) == nil {
		wanted := e.ownerless()
		if len(wanted) == 0 {
			continue
		}
		start, seen := time.Now(), monotonicNow()
		found := e.owners(ctx, wanted)
		e.setOwners(found, seen)
		_ = schedule.Sleep(ctx, max(ownerPause, schedule.Rest(time.Since(start), ownerShare)))
	}
}

// ownerless returns the sockets whose process is neither known nor was searched for.
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
	e.reportDumped(changes)
}
