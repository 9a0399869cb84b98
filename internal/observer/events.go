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
	burstPause  = 500 * time.Microsecond // between reads while events pour in
	burstEvents = 256                    // after so many, look for hooks that were skipped

	// Each wake-up costs a tenth of a millisecond of CPU, what is told a whole
	// one, and UDP sockets can come and go without end. After wakeBurst wake-ups
	// for UDP beyond one each wakeSpacing we doze, until half of them are made
	// good: UDP is read once each dozeSpacing, and what is gone again by the next
	// reading is not told.
	wakeSpacing = 40 * time.Millisecond
	dozeSpacing = 100 * time.Millisecond
	wakeBurst   = 32
)

// readEvents applies events until the source is shut.
func (e *engine) readEvents() error {
	pouring, unchecked := false, 0
	var paid time.Time // until when wake-ups are paid for
	price := wakeSpacing
	for {
		n, onlyUDP, err := e.take()
		if err != nil {
			return err
		}
		unchecked += n
		if onlyUDP {
			now := time.Now()
			if paid.Before(now) {
				paid = now
			}
			paid = paid.Add(price)
		}
		switch {
		case n == 0:
			if unchecked >= burstEvents {
				e.mu.Lock()
				e.checkDrops()
				e.mu.Unlock()
				unchecked = 0
			}
			doze := e.rest(time.Until(paid))
			price = max(wakeSpacing, doze)
			if err := e.source.Wait(doze); errors.Is(err, os.ErrClosed) {
				return nil
			} else if err != nil {
				return err
			}
			pouring = false
		case pouring:
			// Being awake already, we cost the producers no wake-up.
			time.Sleep(burstPause)
		default:
			pouring = true
		}
	}
}

// rest decides how to wait, by how far wake-ups for UDP are paid for in advance. It
// returns for how long to doze, 0 for not at all.
func (e *engine) rest(ahead time.Duration) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	most := wakeBurst * wakeSpacing
	if e.dozing {
		most /= 2
	}
	if e.dozing = ahead > most; e.dozing {
		return dozeSpacing
	}
	e.ripen(0)
	return 0
}

// take applies one batch of events, and says if it was for UDP alone.
func (e *engine) take() (n int, onlyUDP bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tcp, e.udp = false, false
	n, err = e.takeLocked()
	return n, e.udp && !e.tcp, err
}

func (e *engine) takeLocked() (int, error) {
	n, err := e.source.Read(batchLimit, e.sample)
	if e.source.takeLost() {
		e.lost("the ring buffer was full")
	}
	e.tell(e.batch)
	e.batch = e.batch[:0]
	e.ripen(dozeSpacing)
	return n, err
}

// drain applies the events that were begun before it was called.
func (e *engine) drain() error {
	if e.source == nil {
		return nil
	}
	// A producer is between reserve and commit for far less than this.
	const patience = 1000
	idle := 0
	for end := e.source.End(); int64(e.source.Position()-end) < 0 && idle < patience; {
		n, err := e.takeLocked()
		if err != nil {
			return err
		}
		if n == 0 {
			idle++
			time.Sleep(10 * time.Microsecond)
		}
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
	fresh := e.dozing && udp && e.model.sockets[e.record.socket.Cookie] == nil
	change, ok, ask := e.model.apply(&e.record)
	if ok && fresh {
		e.young[change.Socket.Cookie] = time.Now()
	} else if ok && !e.withheld(&change) {
		e.batch = append(e.batch, change)
	}
	if ask == 0 {
		return
	}
	at := time.Now()
	if e.record.kind == bpf.SockEventKindEVENT_CHECK {
		e.checks = 0
		at = at.Add(checkDelays()[0])
	}
	e.ask(ask, at)
}

// withheld reports whether a change need not be told, as its socket was not.
func (e *engine) withheld(change *Event) bool {
	_, young := e.young[change.Socket.Cookie]
	if young && change.Gone {
		delete(e.young, change.Socket.Cookie)
	}
	return young
}

// ripen tells of what was not told and was read so long ago.
func (e *engine) ripen(age time.Duration) {
	if len(e.young) == 0 {
		return
	}
	var ripe []Event
	for cookie, since := range e.young {
		if time.Since(since) < age {
			continue
		}
		delete(e.young, cookie)
		if en := e.model.sockets[cookie]; en != nil {
			ripe = append(ripe, Event{Socket: en.socket})
		}
	}
	e.tell(ripe)
}
