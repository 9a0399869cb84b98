// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

const (
	batchLimit  = 1024 // records for one Apply
	burstEvents = 256  // after so many, look for hooks that were skipped: when it is quiet
	checkEvents = 4096 // and during a burst

	// What the agent does once for each read of the ring costs as much as some twenty
	// changes. A burst begins when briskWakes records were read before a read found none, or
	// after briskWakes wake-ups in a row at sustainedRate or more. Then the pause between
	// reads grows while that rate lasts, until a read finds a good part of a batch.
	briskWakes    = 8
	sustainedRate = 2                    // records in a millisecond
	briskPause    = 4 * time.Millisecond // the first one after such wake-ups
	burstPause    = 500 * time.Microsecond
	longestPause  = 25 * time.Millisecond

	// Each wake-up costs 0.1 ms of CPU, each report 1 ms, and UDP sockets can come
	// and go without end. So wake-ups for UDP alone have a budget: udpBurst of
	// them, and one more each udpWakeCost. When it is spent, UDP is read once each
	// throttleInterval, and what is gone by the next reading is not reported, until
	// half of the budget is back.
	udpWakeCost      = 40 * time.Millisecond
	udpBurst         = 32
	throttleInterval = 100 * time.Millisecond
)

// readEvents applies events until ctx ends or the source is stopped.
func (e *engine) readEvents(ctx context.Context) error {
	var pace pacer
	unchecked := 0
	check := func(atLeast int) {
		if unchecked < atLeast {
			return
		}
		e.mu.Lock()
		e.checkDrops()
		e.mu.Unlock()
		unchecked = 0
	}
	for ctx.Err() == nil {
		n, err := e.take()
		if err != nil {
			return err
		}
		unchecked += n
		if n == 0 {
			check(burstEvents)
			if err := e.source.Wait(e.throttle()); errors.Is(err, os.ErrClosed) {
				return nil
			} else if err != nil {
				return err
			}
			pace.woke(time.Now())
			continue
		}
		check(checkEvents)
		// Not a wait for an event: programs send no wake-ups to a reader that is awake.
		_ = schedule.Sleep(ctx, pace.read(n))
	}
	return nil
}

// pacer says how long to leave events unread, so that many are read at once while there
// are many.
type pacer struct {
	woken time.Time // when an event last ended a wait
	found int       // records since then
	brisk int       // how many wake-ups in a row came while there were many
	burst bool
	pause time.Duration // the last one of the burst
}

// woke is called when an event has ended a wait.
func (p *pacer) woke(now time.Time) {
	if p.found == 0 {
		return // the last wake-up was for nothing
	}
	if many(p.found, now.Sub(p.woken)) {
		p.brisk++
	} else {
		p.brisk = 0
	}
	*p = pacer{woken: now, brisk: p.brisk, burst: p.brisk >= briskWakes}
}

// read is called when n records were read, one or more. It returns how long to pause.
func (p *pacer) read(n int) time.Duration {
	p.found += n
	switch {
	case !p.burst, p.pause == 0 && p.brisk < briskWakes && p.found < briskWakes:
		p.burst = true
		return 0
	case p.pause == 0 && p.brisk >= briskWakes:
		p.pause = briskPause
	case p.pause == 0 || n >= batchLimit || !many(n, p.pause):
		p.pause = burstPause
	case n < batchLimit/4:
		p.pause = min(2*p.pause, longestPause)
	case n > batchLimit/2:
		p.pause = max(p.pause/2, burstPause)
	}
	return p.pause
}

// many reports whether n records within d are so many that they are read in batches.
func many(n int, d time.Duration) bool { return time.Duration(n)*time.Millisecond >= d*sustainedRate }

// throttle returns how long to leave UDP unread, 0 while there is budget.
func (e *engine) throttle() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	least := 0.0
	if e.throttled {
		least = float64(e.budget.Burst()) / 2
	}
	if e.throttled = e.budget.Tokens() < least; e.throttled {
		return throttleInterval
	}
	e.reportPending(0)
	return 0
}

// spend pays for a wake-up for UDP alone. Throttled readings cost their interval,
// so that the budget recovers only while there are fewer events.
func (e *engine) spend() {
	cost := udpWakeCost
	if e.throttled {
		cost = throttleInterval
	}
	e.budget.ReserveN(time.Now(), int(cost/time.Millisecond))
}

// take applies one batch of events and returns how many records there were.
func (e *engine) take() (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tcp, e.udp = false, false
	n, err := e.takeLocked()
	if e.udp && !e.tcp {
		e.spend()
	}
	return n, err
}

func (e *engine) takeLocked() (int, error) {
	e.read = time.Since(e.started)
	n, err := e.source.Read(batchLimit, e.sample)
	e.rename()
	if e.source.takeLost() {
		e.lost("the ring buffer was full")
	}
	e.report(e.batch)
	e.batch = e.batch[:0]
	e.reportPending(throttleInterval)
	return n, err
}

// drain applies the events that were begun before it was called. It does not wait
// for ever: if a program is interrupted before it commits its record, the events from
// there on count as lost.
func (e *engine) drain() error {
	if e.source == nil {
		return nil
	}
	// A program commits its record within far less than this.
	const maxIdle = 1000
	idle := 0
	for end := e.source.End(); int64(e.source.Position()-end) < 0; {
		n, err := e.takeLocked()
		if err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		if idle++; idle > maxIdle {
			e.lost("a record of the ring buffer was not committed in time")
			break
		}
		asleep := time.Now()
		time.Sleep(10 * time.Microsecond) // the commit of a record that was begun notifies nobody
		e.waited += time.Since(asleep)
	}
	for e.source.Rearm() {
		if _, err := e.takeLocked(); err != nil {
			return err
		}
	}
	return nil
}

// sample takes in one event; its change is put into the batch.
func (e *engine) sample(b []byte) {
	e.counters.events.Add(1)
	if err := e.decoder.decode(b, &e.record); err != nil {
		e.counters.malformed.Add(1)
		e.lost(err.Error())
		return
	}
	if e.record.kind == bpf.SockEventKindEVENT_RENAME {
		e.renames[e.record.socket.PID] = e.record.socket
		return
	}
	udp := e.record.socket.Protocol == port.UDP
	e.tcp, e.udp = e.tcp || !udp, e.udp || udp
	fresh := e.throttled && udp && e.model.sockets[e.record.socket.Cookie] == nil
	change, ok, need := e.model.apply(&e.record)
	if e.record.decides() {
		e.recent.add(e.record.socket.Cookie, e.read)
	}
	if ok && fresh {
		e.pending[change.Socket.Cookie] = time.Now()
	} else if ok && !e.isPending(&change) {
		e.add(change)
	}
	if need == 0 {
		return
	}
	at := time.Now()
	if e.record.kind == bpf.SockEventKindEVENT_CHECK {
		e.checks = 0
		at = at.Add(checkDelays()[0])
	}
	e.planDump(need, at)
}

// add puts a change into the batch. A socket that was bound and listens now is one change.
func (e *engine) add(change Event) {
	if n := len(e.batch); n > 0 && !change.Gone {
		last := &e.batch[n-1]
		if last.Socket.Cookie == change.Socket.Cookie && !last.Gone && !last.Socket.Listening {
			*last = change
			return
		}
	}
	e.batch = append(e.batch, change)
}

// isPending reports whether a change need not be reported, because its socket was
// not. If the socket is gone, it is no longer pending.
func (e *engine) isPending(change *Event) bool {
	_, pending := e.pending[change.Socket.Cookie]
	if pending && change.Gone {
		delete(e.pending, change.Socket.Cookie)
	}
	return pending
}

// reportPending reports the pending sockets that were read at least age ago.
func (e *engine) reportPending(age time.Duration) {
	if len(e.pending) == 0 {
		return
	}
	var due []Event
	for cookie, since := range e.pending {
		if time.Since(since) < age {
			continue
		}
		delete(e.pending, cookie)
		if en := e.model.sockets[cookie]; en != nil {
			due = append(due, Event{Socket: en.socket})
		}
	}
	e.report(due)
}
