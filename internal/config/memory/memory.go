// SPDX-License-Identifier: Apache-2.0

// Package memory reads how much memory this process uses, and returns to the kernel
// what a burst of work left behind.
package memory

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Percent is the GOGC of the agent and of the host peer.
const Percent = 35

const (
	// readyTimeout is how long to wait for the start to be over.
	readyTimeout = 10 * time.Second
	// startSize is how many bytes the runtime may use at the start before anything is
	// collected. GOGC alone would collect at 4, 6, 9 MB, and so on.
	startSize = 48 << 20
	// settleAfter is how long work may go on after a collection.
	settleAfter = time.Second
	// pauseMin and pauseMax bound the time between two releases. It doubles while the process
	// allocates again what was released.
	pauseMin = 2 * time.Second
	pauseMax = 4 * time.Minute
	// quiet is how long nothing is collected until the next pause is pauseMin again.
	quiet = 30 * time.Second
	// worthwhile is how many free bytes are given back.
	worthwhile = 1 << 20
)

// Usage is the resident memory of a process, in bytes.
type Usage struct {
	Anonymous int64 `metric:"memory_anonymous_bytes" help:"Resident memory of the agent's own: heap and stacks."`
	File      int64 `metric:"memory_file_bytes" help:"Resident pages of files, most of them the executable's, which the kernel reclaims when it needs memory."`
}

// Read returns the memory of this process (proc_pid_status(5)).
func Read() (Usage, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return Usage{}, fmt.Errorf("memory: %w", err)
	}
	return parse(b)
}

func parse(status []byte) (u Usage, err error) {
	fields := map[string]*int64{"RssAnon": &u.Anonymous, "RssFile": &u.File}
	for s := bufio.NewScanner(bytes.NewReader(status)); s.Scan(); {
		key, value, _ := strings.Cut(s.Text(), ":")
		field := fields[key]
		if field == nil {
			continue
		}
		kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		if err != nil {
			return Usage{}, fmt.Errorf("memory: %s: %w", key, err)
		}
		*field = kb << 10
		delete(fields, key)
	}
	if len(fields) > 0 {
		return Usage{}, fmt.Errorf("memory: /proc/self/status lacks RssAnon or RssFile")
	}
	return u, nil
}

// Keep returns memory to the kernel after the start and after each burst of work, until ctx
// ends. The Go runtime would keep it for minutes.
//
// Until ready is closed, or 10 s have passed, little garbage is collected; ready may be nil.
// After that percent is GOGC: where there is little garbage, collecting it early costs less
// than the memory that it would occupy. If the environment has GOGC or GOMEMLIMIT, that
// counts alone.
//
// It is woken by collections. An idle process has one every two minutes, by the runtime.
func Keep(ctx context.Context, ready <-chan struct{}, percent int) {
	if os.Getenv("GOGC") == "" && os.Getenv("GOMEMLIMIT") == "" {
		defer debug.SetGCPercent(debug.SetGCPercent(percent))
		if ready != nil {
			limit := debug.SetMemoryLimit(startSize)
			debug.SetGCPercent(-1)
			_ = schedule.Wait(ctx, time.Now().Add(readyTimeout), ready)
			debug.SetGCPercent(percent)
			debug.SetMemoryLimit(limit)
		}
	}
	pause := schedule.Backoff{Min: pauseMin, Max: pauseMax}
	for first := true; schedule.Sleep(ctx, settleAfter) == nil; first = false {
		next := collection() // one after this look is not missed
		if first || free() >= worthwhile {
			debug.FreeOSMemory()
			if schedule.Sleep(ctx, pause.Next()) != nil {
				return
			}
			continue
		}
		began := time.Now()
		if schedule.Wait(ctx, time.Time{}, next) != nil {
			return
		}
		if time.Since(began) > quiet {
			pause.Reset()
		}
	}
}

// collection returns a channel that is notified after the next collection.
func collection() schedule.Signal {
	ended := schedule.NewSignal()
	// Nothing refers to this object, so the next collection calls the function.
	runtime.AddCleanup(new(*int), schedule.Signal.Notify, ended)
	return ended
}

// free returns how many bytes of the heap hold nothing and are not given back.
func free() uint64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/free:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}
