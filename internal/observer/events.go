// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"errors"
	"os"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
)

const (
	batchLimit  = 1024                   // records for one Apply
	burstPause  = 500 * time.Microsecond // between reads during a burst
	burstEvents = 256                    // after so many, look for hooks that were skipped

	// Each wake-up costs 0.1 ms of CPU, each report 1 ms, and UDP sockets can come
	// and go without end. So wake-ups for UDP alone have a budget: udpBurst of
	// them, and one more each udpWakeCost. When it is spent, UDP is read once each
	// throttleInterval, and what is gone by the next reading is not reported, until
	// half of the budget is back.
	udpWakeCost      = 40 * time.Millisecond
	udpBurst         = 32
	throttleInterval = 100 * time.Millisecond
)

// readEvents applies events until the source is stopped.
func (e *engine) readEvents() error {
	burst, unchecked := false, 0
	for {
		n, err := e.take()
		if err != nil {
			return err
		}
		unchecked += n
		switch {
		case n == 0:
			if unchecked >= burstEvents {
				e.mu.Lock()
				e.checkDrops()
				e.mu.Unlock()
				unchecked = 0
			}
			if err := e.source.Wait(e.throttle()); errors.Is(err, os.ErrClosed) {
				return nil
			} else if err != nil {
				return err
			}
			burst = false
		case burst:
			// Not a wait for an event: programs send no wake-ups to a reader that is awake.
			time.Sleep(burstPause)
		default:
			burst = true
		}
	}
}

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
		e.batch = append(e.batch, change)
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
