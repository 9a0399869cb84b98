// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"context"
	"math"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"
)

const testPercent = 35

// pacing returns the runtime's GOGC, -1 if it is off, and its memory limit.
func pacing() (percent int32, limit uint64) {
	s := []metrics.Sample{{Name: "/gc/gogc:percent"}, {Name: "/gc/gomemlimit:bytes"}}
	metrics.Read(s)
	return int32(s[0].Value.Uint64()), s[1].Value.Uint64()
}

// keepPacing restores the runtime's settings when the test ends, and hides those of the
// environment.
func keepPacing(t *testing.T) {
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "")
	percent, limit := debug.SetGCPercent(100), debug.SetMemoryLimit(math.MaxInt64)
	t.Cleanup(func() {
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(limit)
	})
}

// reaches waits until GOGC is percent.
func reaches(t *testing.T, percent int32) {
	t.Helper()
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		got, limit := pacing()
		if got == percent && (limit == math.MaxInt64) == (percent > 0) {
			return
		}
		if time.Now().After(until) {
			t.Fatalf("GOGC is %d with a limit of %d bytes, want GOGC %d", got, limit, percent)
		}
	}
}

// At rest GOGC is off, so that the runtime does not collect every two minutes: it does so
// only where GOGC is on.
func TestNoCollectionsAtRest(t *testing.T) {
	keepPacing(t)
	c := newCollector(testPercent)
	c.rest(func() {})
	defer c.work()
	if got, limit := pacing(); got != -1 || limit == math.MaxInt64 {
		t.Errorf("GOGC is %d with a limit of %d bytes, want it off with a limit", got, limit)
	}
	c.work()
	if got, limit := pacing(); got != testPercent || limit != math.MaxInt64 {
		t.Errorf("after it GOGC is %d with a limit of %d bytes, want %d without", got, limit, testPercent)
	}
}

// A process that grows while it rests is collected as usual after the first collection: the
// limit never slows it down.
func TestGrowthEndsRest(t *testing.T) {
	keepPacing(t)
	ended := make(chan struct{})
	c := newCollector(testPercent)
	runtime.GC()
	used, live := readRuntime()
	c.rest(func() { close(ended) })
	_, limit := pacing()
	if most := used + headroom + max(leastGrowth, live*testPercent/100) + 1<<20; limit < used+headroom || limit > most {
		t.Errorf("a limit of %d bytes with %d in use, want at most %d", limit, used, most)
	}
	var kept [][]byte
	for range 64 {
		kept = append(kept, make([]byte, 1<<20))
	}
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("64 MB more and no collection")
	}
	reaches(t, testPercent)
	runtime.KeepAlive(kept)
}

// A collection of an earlier rest does not end the next one.
func TestOnlyItsCollectionEndsRest(t *testing.T) {
	keepPacing(t)
	c := newCollector(testPercent)
	c.rest(func() { t.Error("an earlier rest has ended") })
	c.work()
	c.rest(func() {})
	c.collected(1)
	reaches(t, -1)
	c.collected(2)
	reaches(t, testPercent)
	c.collected(2) // the cleanup, after it was over
	c.work()
}

// Nothing is collected while a process starts, unless it takes much memory.
func TestNoCollectionsAtStart(t *testing.T) {
	keepPacing(t)
	debug.FreeOSMemory() // of the tests before
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		Releaser{Ready: make(chan struct{}), GCPercent: testPercent, Work: func(context.Context) error {
			t.Error("waits for work before the start is over")
			return nil
		}}.Run(ctx)
	}()
	reaches(t, -1)
	if _, limit := pacing(); limit != startSize {
		t.Errorf("a limit of %d bytes, want %d", limit, startSize)
	}
	runtime.GC()
	reaches(t, defaultPercent)
	cancel()
	<-ended
	reaches(t, defaultPercent)
}

// The settings of the environment count.
func TestEnvironmentDecides(t *testing.T) {
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		t.Run(name, func(t *testing.T) {
			keepPacing(t)
			t.Setenv(name, "1000000000")
			c := newCollector(testPercent)
			c.rest(func() {})
			c.work()
			if got, limit := pacing(); got != 100 || limit != math.MaxInt64 {
				t.Errorf("GOGC is %d with a limit of %d bytes, want 100 without", got, limit)
			}
		})
	}
}

// A process that was collected rests again, without work.
func TestRestsAgain(t *testing.T) {
	keepPacing(t)
	ready := make(chan struct{})
	close(ready)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	waits := make(chan struct{}, 100)
	go func() {
		defer close(ended)
		Releaser{Ready: ready, GCPercent: testPercent, Work: func(ctx context.Context) error {
			waits <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}}.Run(ctx)
	}()
	<-waits
	reaches(t, -1)
	runtime.GC()
	<-waits
	reaches(t, -1)
	cancel()
	<-ended
	reaches(t, testPercent)
}
