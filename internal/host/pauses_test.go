// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

// Two hosts that take a guest from each other do so ever less often.
func TestTwoHostsOfOneGuestBackOff(t *testing.T) {
	o := Options{BackoffMin: 100 * time.Millisecond, BackoffMax: 10 * time.Second}
	taken := &link.CloseError{Reason: link.ReasonReplaced, Remote: true}
	hosts := [2]*pauses{newPauses(o, false), newPauses(o, false)}
	var now, since time.Duration
	const hour = time.Hour
	takeovers := 0
	for at := 0; now < hour; at = 1 - at {
		pause := hosts[at].next(taken, now-since, true) // host at lost the guest, and takes it again
		since, now = now, now+pause
		takeovers++
	}
	if takeovers > 25 {
		t.Errorf("%d takeovers in an hour", takeovers)
	}
	// A host that had the guest for long is not one of two that compete.
	if d := hosts[0].next(taken, hour, true); d > 13*time.Second {
		t.Errorf("paused %s after an hour", d)
	}
	if d := hosts[0].next(errors.New("refused"), 0, false); d > 125*time.Millisecond {
		t.Errorf("paused %s after a failed attempt", d)
	}
}

// A guest that dials comes back when it wants: it is not kept waiting for minutes.
func TestGuestThatDialsIsTakenSoonAfterATakeover(t *testing.T) {
	taken := &link.CloseError{Reason: link.ReasonReplaced, Remote: true}
	p := newPauses(Options{BackoffMin: 100 * time.Millisecond, BackoffMax: 10 * time.Second}, true)
	for range 20 {
		if d := p.next(taken, time.Minute, true); d > servedMax {
			t.Errorf("paused %s", d)
		}
	}
	if err := replacedError(time.Second, true).Error(); strings.Contains(err, "retrying") {
		t.Error(err)
	}
}

// An agent that served is dialled again soon, however often its sessions are reset. It is
// not dialled in a tight loop, and rarely if it ends each session after the snapshot.
func TestShortSessionsThatServedReconnectSoon(t *testing.T) {
	const minutes = 10
	for _, c := range []struct {
		lasts    time.Duration
		min, max int // sessions
	}{
		{briefSession, minutes * 60, minutes * 60 * 3}, // pauses of 375 to 500 ms, after the first few
		{10 * time.Millisecond, minutes * 6, minutes*8 + briefSessions + 5},
	} {
		synctest.Test(t, func(t *testing.T) {
			a := newAgent(t, "vm")
			a.begins(snapshot(1))
			a.onSession = func(s link.Session) {
				if sendFrame(s, snapshot(1)) == nil {
					time.Sleep(c.lasts)
				}
				_ = s.Close()
			}
			_, stop := start(t, Options{Network: newMemory(), BackoffMin: 100 * time.Millisecond, BackoffMax: 10 * time.Second}, a)
			time.Sleep(minutes * time.Minute)
			a.mu.Lock()
			dials := a.dials
			a.mu.Unlock()
			if dials < c.min || dials > c.max {
				t.Errorf("%d sessions of %s in %d minutes, want %d to %d", dials, c.lasts, minutes, c.min, c.max)
			}
			stop()
		})
	}
}

// A few brief sessions in a row delay nothing, and one that lasts ends the long pauses.
func TestManyBriefSessionsBackOff(t *testing.T) {
	p := newPauses(Options{BackoffMin: 100 * time.Millisecond, BackoffMax: 10 * time.Second}, false)
	reset := errors.New("reset")
	for range 3 {
		for i := range briefSessions {
			if d := p.next(reset, time.Millisecond, true); d > servedMax {
				t.Errorf("paused %s after %d brief sessions", d, i+1)
			}
		}
		for range 5 {
			p.next(reset, time.Millisecond, true)
			p.next(reset, 0, false) // an attempt that fails is no session that lasts
		}
		if d := p.next(reset, time.Millisecond, true); d < 7*time.Second || d > 10*time.Second {
			t.Errorf("paused %s after many brief sessions", d)
		}
		if d := p.next(reset, briefSession, true); d > servedMax {
			t.Errorf("paused %s after a session that lasted", d)
		}
	}
}

// Attempts that failed before a session that served do not delay the next one.
func TestServedSessionForgetsFailedAttempts(t *testing.T) {
	p := newPauses(Options{BackoffMin: 100 * time.Millisecond, BackoffMax: 10 * time.Second}, false)
	reset := errors.New("reset")
	for range 20 {
		p.next(reset, 0, false)
	}
	for _, served := range []bool{true, false} {
		if d := p.next(reset, time.Second, served); d < 75*time.Millisecond || d > 100*time.Millisecond {
			t.Errorf("paused %s, want the shortest pause (served: %t)", d, served)
		}
	}
	for range 20 {
		p.next(reset, time.Second, true)
	}
	if d := p.next(reset, stableAfter, true); d > 100*time.Millisecond {
		t.Errorf("paused %s after a long session", d)
	}
	// A guest that violates the protocol does not serve.
	for range 20 {
		p.next(errProtocol, time.Second, true)
	}
	if d := p.next(errProtocol, time.Second, true); d < 7*time.Second {
		t.Errorf("paused %s after many violations of the protocol", d)
	}
}

// A slow attempt that fails is not a session that lasted.
func TestSlowDialsBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const slow = 2 * stableAfter
		var ended, longest time.Duration
		begin, attempts := time.Now(), 0
		ctx, cancel := context.WithCancel(t.Context())
		h, err := New(Options{Guests: []Guest{{Name: "vm", Dial: func(context.Context) (link.Session, error) {
			longest = max(longest, time.Since(begin)-ended)
			time.Sleep(slow)
			if attempts++; attempts == 12 {
				cancel()
			}
			ended = time.Since(begin)
			return nil, errors.New("unreachable")
		}}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Run(ctx); err != nil {
			t.Fatal(err)
		}
		if longest < 5*time.Second {
			t.Errorf("the longest pause is %s, want nearly 10s", longest)
		}
	})
}

// A guest that floods its host with changes is read at a limited rate, and its last
// change is applied.
func TestFloodOfChangesIsLimited(t *testing.T) {
	a := newAgent(t, "vm")
	k := key(port.TCP, any4, ports.Free(t))
	a.begins(snapshot(1))
	start(t, Options{}, a)
	a.settled(1)
	begin := time.Now()
	const changes = messageBurst + messageRate
	for n := range uint64(changes) {
		c := put(n+1, pub(k))
		if n%2 == 1 {
			c = removed(n+1, k)
		}
		a.say(c)
	}
	a.settled(1 + changes)
	if d := time.Since(begin); d < 900*time.Millisecond {
		t.Errorf("%d changes were read in %s, want a second", changes, d)
	}
}

// Also the largest set of a guest that has sent others before is read in the time that it has.
func TestLargestSetIsReadInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimits()
		read := func(rows, bytes int) time.Duration {
			begin := time.Now()
			const messages = 256
			for range messages {
				if err := l.wait(t.Context(), rows/messages, bytes/messages); err != nil {
					t.Fatal(err)
				}
			}
			return time.Since(begin)
		}
		read(itemBurst, byteBurst)
		if d := read(wire.MaxPublications, wire.MaxSetBytes); d > snapshotTimeout*2/3 {
			t.Errorf("it takes %s, and the session ends after %s", d, snapshotTimeout)
		}
	})
}

// A few large messages are limited like many small ones.
func TestFloodOfLargeChangesIsLimited(t *testing.T) {
	for name, limiter := range map[string]func(*limits) *rate.Limiter{
		"items": func(l *limits) *rate.Limiter { return l.items },
		"bytes": func(l *limits) *rate.Limiter { return l.bytes },
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t, "vm")
			a.begins(snapshot(1))
			h, _ := start(t, Options{}, a)
			a.settled(1)
			l := limiter(&h.guests[0].limits)
			l.SetBurst(500)
			l.SetLimit(1000)
			var keys []port.Key
			for n := range uint16(500) {
				keys = append(keys, key(port.TCP, any4, 1+n))
			}
			begin := time.Now()
			const changes = 3
			for n := range uint64(changes) {
				a.say(removed(n+1, keys...))
			}
			a.settled(1 + changes)
			if d := time.Since(begin); d < 900*time.Millisecond {
				t.Errorf("%d changes of %d keys were read in %s, want a second", changes, len(keys), d)
			}
		})
	}
}
