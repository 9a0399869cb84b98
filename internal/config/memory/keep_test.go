// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// pacing returns the runtime's GOGC, -1 if it is off, and its memory limit.
func pacing() (percent int32, limit uint64) {
	s := []metrics.Sample{{Name: "/gc/gogc:percent"}, {Name: "/gc/gomemlimit:bytes"}}
	metrics.Read(s)
	return int32(s[0].Value.Uint64()), s[1].Value.Uint64()
}

// keep runs Keep until the test ends, and restores the runtime's settings then.
func keep(t *testing.T, ready <-chan struct{}) {
	percent, limit := debug.SetGCPercent(100), debug.SetMemoryLimit(math.MaxInt64)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		Keep(ctx, ready, Percent)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		if got, _ := pacing(); got != 100 {
			t.Errorf("GOGC is %d after it, want 100", got)
		}
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(limit)
	})
}

// reaches waits until GOGC and the memory limit are as given.
func reaches(t *testing.T, percent int32, limit uint64) {
	t.Helper()
	wait.Until(t, "GOGC changes", func() error {
		if p, l := pacing(); p != percent || l != limit {
			return fmt.Errorf("GOGC is %d, and the limit %d bytes", p, l)
		}
		return nil
	})
}

// Little is collected while a process starts, and early after that.
func TestCollectsLittleAtStart(t *testing.T) {
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "")
	ready := make(chan struct{})
	keep(t, ready)
	reaches(t, -1, startSize)
	close(ready)
	reaches(t, Percent, math.MaxInt64)
}

// The settings of the environment count alone.
func TestEnvironmentDecides(t *testing.T) {
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("GOGC", "")
			t.Setenv("GOMEMLIMIT", "")
			t.Setenv(name, "1000000000")
			keep(t, make(chan struct{}))
			time.Sleep(50 * time.Millisecond)
			if percent, limit := pacing(); percent != 100 || limit != math.MaxInt64 {
				t.Errorf("GOGC is %d with a limit of %d bytes, want 100 without", percent, limit)
			}
		})
	}
}

// heap returns how much memory of the heap the kernel has not got back, in bytes.
func heap() uint64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/free:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64() + s[1].Value.Uint64()
}

// What a burst of work left is given back after the next collection.
func TestMemoryIsGivenBack(t *testing.T) {
	keep(t, nil)
	const size = 64 << 20
	for range 2 { // each time anew
		runtime.KeepAlive(bytes.Repeat([]byte{1}, size))
		runtime.GC()
		wait.Until(t, "memory is given back", func() error {
			if now := heap(); now > size/2 {
				return fmt.Errorf("the heap has %d bytes", now)
			}
			return nil
		})
	}
}
