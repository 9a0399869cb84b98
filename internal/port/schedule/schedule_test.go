// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestSignalCoalesces(t *testing.T) {
	s := NewSignal()
	s.Notify()
	s.Notify()
	<-s
	select {
	case <-s:
		t.Error("two notifications were received, want one")
	default:
	}
}

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		if err := Sleep(ctx, time.Minute); err != nil || time.Since(start) != time.Minute {
			t.Errorf("Sleep: %v after %s", err, time.Since(start))
		}
		time.AfterFunc(time.Second, cancel)
		if err := Sleep(ctx, time.Minute); !errors.Is(err, context.Canceled) || time.Since(start) != time.Minute+time.Second {
			t.Errorf("Sleep: %v after %s", err, time.Since(start))
		}
		if err := Sleep(ctx, 0); !errors.Is(err, context.Canceled) {
			t.Errorf("Sleep(0) with an ended context: %v", err)
		}
	})
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		at := func(want time.Duration) {
			t.Helper()
			if got := time.Since(start); got != want {
				t.Errorf("returned after %s, want %s", got, want)
			}
		}
		_ = Wait(ctx, start.Add(time.Second), nil)
		at(time.Second)
		_ = Wait(ctx, start, nil) // in the past
		at(time.Second)
		s := NewSignal()
		time.AfterFunc(time.Second, s.Notify)
		_ = Wait(ctx, time.Time{}, s)
		at(2 * time.Second)
		time.AfterFunc(time.Second, cancel)
		if err := Wait(ctx, time.Time{}, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("Wait: %v", err)
		}
		at(3 * time.Second)
	})
}

func TestRest(t *testing.T) {
	for _, c := range []struct {
		cost time.Duration
		n    int
		want time.Duration
	}{{time.Second, 1, 0}, {time.Second, 10, 9 * time.Second}, {0, 20, 0}} {
		if got := Rest(c.cost, c.n); got != c.want {
			t.Errorf("Rest(%s, %d) = %s, want %s", c.cost, c.n, got, c.want)
		}
	}
}

func TestBackoff(t *testing.T) {
	b := Backoff{Min: 100 * time.Millisecond, Max: time.Second}
	for _, want := range []time.Duration{100, 200, 400, 800, 1000, 1000} {
		if got := b.Next(); got != want*time.Millisecond {
			t.Errorf("Next = %s, want %dms", got, want)
		}
	}
	if !b.Failing() {
		t.Error("not failing after failures")
	}
	b.Reset()
	if b.Failing() {
		t.Error("failing after Reset")
	}
	if got := b.Next(); got != b.Min {
		t.Errorf("Next after Reset = %s, want %s", got, b.Min)
	}
	if got := b.Longest(); got != b.Max {
		t.Errorf("Longest = %s, want %s", got, b.Max)
	}
	b.Hasten(300 * time.Millisecond)
	for _, want := range []time.Duration{300, 600} {
		if got := b.Next(); got != want*time.Millisecond {
			t.Errorf("Next after Hasten = %s, want %dms", got, want)
		}
	}
	b.Reset()
	b.Hasten(time.Second)
	if got := b.Next(); got != b.Min {
		t.Errorf("Next after Reset and Hasten = %s, want %s", got, b.Min)
	}
}

func TestBackoffJitterStaysInItsBounds(t *testing.T) {
	for range 1000 {
		b := Backoff{Min: time.Second, Max: time.Minute, Jitter: 0.1}
		if got := b.Next(); got < 900*time.Millisecond || got > time.Second {
			t.Fatalf("Next = %s, want 900ms to 1s", got)
		}
	}
}

func TestDeadlines(t *testing.T) {
	var d Deadlines[string]
	start := time.Now()
	after := func(n int) time.Time { return start.Add(time.Duration(n) * time.Second) }
	if !d.Next().IsZero() || d.Due("a", start) {
		t.Error("the zero value plans something")
	}
	d.Set("a", after(3))
	d.Set("b", after(2))
	if d.Next() != after(2) {
		t.Errorf("Next = %s, want b's", d.Next())
	}
	d.Advance("b", after(4)) // later: no change
	d.Advance("a", after(1))
	d.Advance("c", after(5))
	if d.Next() != after(1) || d.At("b") != after(2) || d.At("c") != after(5) {
		t.Errorf("after Advance: %v", d.at)
	}
	if d.Due("a", after(0)) || !d.Due("a", after(1)) || !d.Take("a", after(1)) || d.Take("a", after(9)) {
		t.Error("a is due once, from its time on")
	}
	d.Set("d", after(3))
	if due := d.TakeAll(after(4)); len(due) != 2 || len(d.TakeAll(after(4))) > 0 || d.Next() != after(5) {
		t.Errorf("due after 4 s: %q", due)
	}
	d.Set("b", after(2))
	d.Cancel("b")
	d.Set("c", time.Time{})
	if !d.Next().IsZero() {
		t.Errorf("Next = %s after all were cancelled", d.Next())
	}
}
