// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// fakeSource is an eventSource whose kernel is the test.
type fakeSource struct {
	mu       sync.Mutex
	queue    [][]byte
	consumed uint64
	written  uint64
	lost     bool
	dropped  uint64
	skipped  uint64
	opened   bool
	tracked  map[uint64]bool
	limit    int // of tracked; 0: none
	wakes    schedule.Signal
	urgent   schedule.Signal // what TCP wakes beside
	waits    int
	reads    int // that found something
	shut     chan struct{}

	// uncommitted is how many of the last records were begun and are not committed.
	uncommitted int
}

func newFakeSource() *fakeSource {
	return &fakeSource{
		opened: true, tracked: make(map[uint64]bool), limit: 1 << 20,
		wakes: schedule.NewSignal(), urgent: schedule.NewSignal(), shut: make(chan struct{}),
	}
}

func (f *fakeSource) send(events ...bpf.SockEvent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range events {
		f.queue = append(f.queue, sample(e))
		f.written++
		if e.Protocol == uint8(port.TCP) {
			f.urgent.Notify()
		}
	}
	f.wakes.Notify()
}

// begin begins a record and leaves it uncommitted.
func (f *fakeSource) begin(e bpf.SockEvent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queue = append(f.queue, sample(e))
	f.written++
	f.uncommitted++
}

// commit commits all records.
func (f *fakeSource) commit() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.uncommitted = 0
	f.wakes.Notify()
}

// lose is what a full ring does.
func (f *fakeSource) lose() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost = true
	f.dropped++
	f.wakes.Notify()
}

func (f *fakeSource) Read(limit int, use func([]byte)) (int, error) {
	f.mu.Lock()
	n := min(limit, len(f.queue)-f.uncommitted)
	batch := f.queue[:n]
	f.queue = f.queue[n:]
	f.consumed += uint64(n)
	if n > 0 {
		f.reads++
	}
	f.mu.Unlock()
	for _, b := range batch {
		use(b)
	}
	return n, nil
}

// found returns how many reads found something.
func (f *fakeSource) found() int { f.mu.Lock(); defer f.mu.Unlock(); return f.reads }

func (f *fakeSource) Wait(throttle time.Duration) error {
	wakes := f.wakes
	var timeout <-chan time.Time
	if throttle > 0 {
		wakes, timeout = f.urgent, time.After(throttle)
	}
	f.mu.Lock()
	f.waits++
	f.mu.Unlock()
	select {
	case <-wakes:
	case <-timeout:
	case <-f.shut:
		return os.ErrClosed
	}
	return nil
}

func (f *fakeSource) Position() uint64 { f.mu.Lock(); defer f.mu.Unlock(); return f.consumed }
func (f *fakeSource) End() uint64      { f.mu.Lock(); defer f.mu.Unlock(); return f.written }

func (f *fakeSource) drops() (all, skipped uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dropped + f.skipped, f.skipped
}

func (f *fakeSource) open(open bool) { f.mu.Lock(); defer f.mu.Unlock(); f.opened = open }
func (f *fakeSource) trackable() int { return f.limit }

func (f *fakeSource) Rearm() bool { return false }

// gate returns whether the gate is open, and a copy of what is tracked.
func (f *fakeSource) gate() (bool, map[uint64]bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.opened, maps.Clone(f.tracked)
}

func (f *fakeSource) takeLost() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	lost := f.lost
	f.lost = false
	return lost
}

func (f *fakeSource) track(cookie uint64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.tracked) >= f.limit {
		return fmt.Errorf("%d sockets: no room", len(f.tracked))
	}
	f.tracked[cookie] = true
	return nil
}

func (f *fakeSource) untrack(cookie uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.tracked, cookie)
}

// keeper is a Handler that keeps the set and a log of calls.
type keeper struct {
	mu    sync.Mutex
	set   map[uint64]Socket
	calls []string
	stale error
}

func newKeeper() *keeper { return &keeper{set: make(map[uint64]Socket)} }

func (k *keeper) note(format string, args ...any) {
	k.calls = append(k.calls, fmt.Sprintf(format, args...))
}

func (k *keeper) Methods([]kernel.Method) {}

func (k *keeper) Replace(set []Socket) {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.set)
	for _, s := range set {
		k.set[s.Cookie] = s
	}
	k.stale = nil
	k.note("replace %d", len(set))
}

// get returns a socket of the set, while the observer may change it.
func (k *keeper) get(cookie uint64) Socket {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.set[cookie]
}

func (k *keeper) Apply(events []Event) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, e := range events {
		if e.Gone {
			delete(k.set, e.Socket.Cookie)
			k.note("gone %d", e.Socket.Cookie)
			continue
		}
		k.set[e.Socket.Cookie] = e.Socket
		k.note("put %d", e.Socket.Cookie)
	}
}

func (k *keeper) Stale(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stale = err
	k.note("stale")
}

// take returns the calls since it was last asked.
func (k *keeper) take() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	calls := k.calls
	k.calls = nil
	return calls
}

func (k *keeper) cookies() []uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Sorted(maps.Keys(k.set))
}

func newTestEngine(h Handler) *engine {
	e := newEngine(h, slog.New(slog.DiscardHandler), new(counters))
	e.interval, e.audit = time.Second, time.Minute
	e.dump = func(context.Context, scope) ([]row, scope, error) { return nil, scopeAll, nil }
	return e
}
