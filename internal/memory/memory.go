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
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	// readyTimeout is how long to wait for the start to be over.
	readyTimeout = 10 * time.Second
	// settleAfter is how long work may go on after it was noticed.
	settleAfter = 500 * time.Millisecond
	// pauseMin and pauseMax bound the time between two releases. It doubles while
	// the process allocates again what was released.
	pauseMin = 2 * time.Second
	pauseMax = 4 * time.Minute
	// quiet is how long nothing may happen until the next pause is pauseMin again.
	quiet = 30 * time.Second
	// growth is how many bytes make a release worthwhile.
	growth = 1 << 20
)

// Usage is the resident memory of a process, in bytes.
type Usage struct {
	Anonymous int64 // heap, stacks: only this process can free it
	File      int64 // pages of files, such as the executable's: the kernel reclaims them at will
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

// Releaser returns memory to the kernel after the start and after each burst of
// work. The Go runtime would keep it for minutes. An idle process is not woken, and
// its garbage is not collected before there is some.
type Releaser struct {
	// Ready is closed when the start is over, until when little garbage is collected. If nil it
	// is over after 10 s, and garbage is collected as ever.
	Ready  <-chan struct{}
	Forget func() // drops caches that only the start needed; may be nil
	// GCPercent is GOGC after the start, 0 for the runtime's default. Where there is little
	// garbage then, collecting it early costs less than the memory that it would occupy. It
	// also says how much the process may allocate at rest until garbage is collected. If the
	// environment has GOGC or GOMEMLIMIT, that counts alone.
	GCPercent int
	Work      func(ctx context.Context) error // returns after work that may leave garbage, or when ctx ends
	// Freed, if not nil, reports whether the work dropped much. Memory is then
	// released even if the process does not use more than after the last release.
	Freed func() bool
}

// Run works until ctx ends.
func (r Releaser) Run(ctx context.Context) {
	start := newCollector(0)
	if r.Ready != nil { // else nobody says when it is over
		start.start()
	}
	err := schedule.Wait(ctx, time.Now().Add(readyTimeout), r.Ready)
	start.work()
	if err != nil {
		return
	}
	gc := newCollector(r.GCPercent)
	defer gc.work()
	gc.work()
	pause := schedule.Backoff{Min: pauseMin, Max: pauseMax}
	for kept := int64(0); ; {
		if schedule.Sleep(ctx, settleAfter) != nil {
			return
		}
		if r.Forget != nil {
			r.Forget()
		}
		freed := r.Freed != nil && r.Freed()
		if now, err := Read(); freed || err != nil || now.Anonymous >= kept+growth {
			gc.work()
			debug.FreeOSMemory()
			now, _ = Read()
			kept = now.Anonymous
			gc.rest(func() {})
			if schedule.Sleep(ctx, pause.Next()) != nil {
				return
			}
		}
		began := time.Now()
		// What was allocated at rest is like work, once it was collected.
		work, collected := context.WithCancel(ctx)
		gc.rest(collected)
		err := r.Work(work)
		collected()
		if err != nil && ctx.Err() != nil {
			return
		}
		if time.Since(began) > quiet {
			pause.Reset()
		}
	}
}
