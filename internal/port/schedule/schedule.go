// SPDX-License-Identifier: Apache-2.0

// Package schedule holds the few ways in which fairlead waits: for a
// notification, for a time, for the earliest of several deadlines, and between
// attempts that fail.
package schedule

import (
	"context"
	"math/rand/v2"
	"time"
)

// Signal is an edge-triggered notification. Any number of Notify calls before
// the next receive are one. Make one with NewSignal.
type Signal chan struct{}

// NewSignal returns a signal with nothing to receive.
func NewSignal() Signal { return make(Signal, 1) }

// Notify makes the next receive return. It never blocks, and does nothing to nil.
func (s Signal) Notify() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Sleep waits for d. It returns early with ctx's error when ctx ends; if ctx has
// ended already it does so whatever d is.
func Sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 || ctx.Err() != nil {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Wait returns when the time is reached (the zero time never is), when something
// is received from wake (nil never sends), or when ctx ends, with ctx's error.
func Wait(ctx context.Context, until time.Time, wake <-chan struct{}) error {
	var reached <-chan time.Time
	if !until.IsZero() {
		t := time.NewTimer(time.Until(until))
		defer t.Stop()
		reached = t.C
	}
	select {
	case <-reached:
	case <-wake:
	case <-ctx.Done():
	}
	return ctx.Err()
}

// Rest returns how long to pause after work that took cost, so that such work
// takes no more than one part in n of the time. n is at least 1.
func Rest(cost time.Duration, n int) time.Duration { return cost * time.Duration(n-1) }

// Backoff is the pause between attempts that fail: Min after the first, then
// twice the one before, up to Max. With Jitter, a fraction between 0 and 1, each
// pause is shortened by up to that fraction, so that many who wait do not try in
// step. It is not safe for concurrent use.
type Backoff struct {
	Min, Max time.Duration
	Jitter   float64

	pause time.Duration // the last one, without jitter
}

// Next returns the pause after one more failure.
func (b *Backoff) Next() time.Duration {
	b.pause = min(max(2*b.pause, b.Min), b.Max)
	if b.Jitter == 0 {
		return b.pause
	}
	return time.Duration(float64(b.pause) * (1 - b.Jitter*rand.Float64()))
}

// Longest makes the next pauses as long as they get, for a failure that time
// will hardly mend, and returns the first of them.
func (b *Backoff) Longest() time.Duration {
	b.pause = b.Max
	return b.Next()
}

// Hasten makes the next pause d at most, unless Min is longer, for a failure that something
// new may mend.
func (b *Backoff) Hasten(d time.Duration) { b.pause = min(b.pause, d/2) }

// Reset forgets the failures, after a success.
func (b *Backoff) Reset() { b.pause = 0 }

// Failing reports whether the last attempt failed.
func (b *Backoff) Failing() bool { return b.pause > 0 }

// Deadlines is a set of times by name, of which the earliest matters. The zero
// value is empty and ready. It is not safe for concurrent use.
type Deadlines[K comparable] struct {
	at map[K]time.Time
}

// Set plans k for t; the zero time cancels it.
func (d *Deadlines[K]) Set(k K, t time.Time) {
	if t.IsZero() {
		delete(d.at, k)
		return
	}
	if d.at == nil {
		d.at = make(map[K]time.Time)
	}
	d.at[k] = t
}

// Advance plans k for t unless it is planned for an earlier time.
func (d *Deadlines[K]) Advance(k K, t time.Time) {
	if was := d.at[k]; was.IsZero() || t.Before(was) {
		d.Set(k, t)
	}
}

// Cancel forgets k.
func (d *Deadlines[K]) Cancel(k K) { delete(d.at, k) }

// At returns when k is planned, the zero time if it is not.
func (d *Deadlines[K]) At(k K) time.Time { return d.at[k] }

// Due reports whether k is planned for now or earlier.
func (d *Deadlines[K]) Due(k K, now time.Time) bool {
	t, ok := d.at[k]
	return ok && !t.After(now)
}

// Take is Due, and cancels k if it is.
func (d *Deadlines[K]) Take(k K, now time.Time) bool {
	due := d.Due(k, now)
	if due {
		delete(d.at, k)
	}
	return due
}

// TakeAll returns all that is planned for now or earlier, and cancels it.
func (d *Deadlines[K]) TakeAll(now time.Time) []K {
	var due []K
	for k, t := range d.at {
		if !t.After(now) {
			due = append(due, k)
			delete(d.at, k)
		}
	}
	return due
}

// Next returns the earliest time that is planned, the zero time if none is.
func (d *Deadlines[K]) Next() time.Time {
	var next time.Time
	for _, t := range d.at {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	return next
}
