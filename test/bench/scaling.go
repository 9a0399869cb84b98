// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/reconcile"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/source/socket"
	"github.com/fairlead/fairlead/test/bench/report"
)

// The measures of scaling.
const (
	changeTime   = "one change, from the observer to the sink"
	changeAllocs = "allocations for one change"
	changeBytes  = "memory allocated for one change"
	perPublished = "memory of one publication"
)

func scalingPart() Part {
	return Part{
		Section: report.Section{
			Name: "scaling", Title: "What one change costs in a large table",
			About: `A socket appears, or goes, while so many others are there. The time is that from the call of
the socket source to the sink that is told, with the registry, the rules and the reconciler between
them, all in one process and without the kernel. All sizes are measured in turns. Allocations do not
depend on how busy the machine is; the memory of a publication is what the heap holds, the tables of
source, registry, reconciler and outcomes together, divided by their number.`,
			Figures: []report.Figure{
				{File: "scaling-time", Title: "One change against the size of the table", Measure: changeTime, Kind: report.Lines, X: "publications", Y: "time", LogX: true, LogY: true},
				{File: "scaling-allocations", Title: "Allocations for one change", Measure: changeAllocs, Kind: report.Lines, X: "publications", Y: "allocations", LogX: true},
			},
		},
		Run: scaling,
	}
}

func scaling(ctx context.Context, e *Env) error {
	sizes := []int{10, 100, 1000, 10_000, 100_000}
	if e.Scale == Tiny {
		sizes = sizes[:3]
	}
	ctx, cancel := context.WithCancel(ctx)
	g, ctx := errgroup.WithContext(ctx)
	defer func() {
		cancel()
		_ = g.Wait()
	}()
	cell := func(measure, unit string, n int) report.Cell {
		return report.Cell{Measure: measure, Mode: modeBPF, Unit: unit, Size: float64(n), SizeUnit: "publications"}
	}
	lines := make([]*line, len(sizes))
	for i, n := range sizes {
		before := heap()
		l, err := newLine(ctx, g, n)
		if err != nil {
			return err
		}
		lines[i] = l
		if n >= 1000 { // fewer are lost in what the heap holds anyway
			e.Value(cell(perPublished, "B", n), float64(heap()-before)/float64(n))
		}
	}
	times := make([][]float64, len(sizes))
	allocs := make([]runtime.MemStats, len(sizes))
	changes := 0
	const perRound = 50
	for range e.Of(100, 40, 2) {
		changes += 2 * perRound
		for i, l := range lines {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for range perRound {
				for _, gone := range []bool{false, true} {
					d, err := l.change(ctx, gone)
					if err != nil {
						return err
					}
					times[i] = append(times[i], d.Seconds())
				}
			}
			runtime.ReadMemStats(&after)
			allocs[i].Mallocs += after.Mallocs - before.Mallocs
			allocs[i].TotalAlloc += after.TotalAlloc - before.TotalAlloc
		}
	}
	for i, n := range sizes {
		e.Samples(cell(changeTime, "s", n), times[i])
		e.Value(cell(changeAllocs, "allocations", n), float64(allocs[i].Mallocs)/float64(changes))
		e.Value(cell(changeBytes, "B", n), float64(allocs[i].TotalAlloc)/float64(changes))
	}
	return nil
}

// heap is what the heap holds without garbage.
func heap() int64 {
	runtime.GC()
	runtime.GC() // what finalizers held on to
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// line is the way of a change through the agent, without the kernel and the link.
type line struct {
	handler chan observer.Handler
	to      observer.Handler
	told    chan time.Time
	next    observer.Socket
}

// newLine sets up a line that knows n sockets.
func newLine(ctx context.Context, g *errgroup.Group, n int) (*line, error) {
	l := &line{handler: make(chan observer.Handler), told: make(chan time.Time, 1)}
	log := slog.New(slog.DiscardHandler)
	src, err := socket.New(socket.Options{Observer: l, Own: func(uint64) bool { return false }, Logger: log})
	if err != nil {
		return nil, err
	}
	reg := registry.New(registry.Options{Rules: config.DefaultAgent().Rules, Logger: log})
	rec := reconcile.New(reg.Publications(), []reconcile.Sink{l}, reconcile.Options{Ready: reg.Ready(), Logger: log})
	feed := reg.Feed(src.Name())
	g.Go(func() error { return src.Run(ctx, feed) })
	g.Go(func() error { return rec.Run(ctx) })
	select {
	case l.to = <-l.handler:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	set := make([]observer.Socket, n)
	for i := range set {
		set[i] = anySocket(i)
	}
	l.next = anySocket(n)
	l.to.Replace(set)
	if _, err := l.wait(ctx); err != nil {
		return nil, err
	}
	if got := rec.Wanted().View().Len(); got != n {
		return nil, fmt.Errorf("%d publications of %d sockets", got, n)
	}
	return l, nil
}

// anySocket is one of many, by its number.
func anySocket(i int) observer.Socket {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	return observer.Socket{
		Cookie: uint64(i + 1), Protocol: port.TCP, Listening: true, Port: uint16(1024 + i%60_000),
		Address: netip.AddrFrom4([4]byte{127, 0, byte(1 + i/60_000), 1}),
		PID:     uint32(os.Getpid()), Comm: "bench", PIDSeen: now.Nano(),
	}
}

// Run implements socket.Observer: its events are those that change makes.
func (l *line) Run(ctx context.Context, h observer.Handler) error {
	select {
	case l.handler <- h:
	case <-ctx.Done():
	}
	<-ctx.Done()
	return nil
}

// change has one socket come or go, and returns how long it took until the sink
// was told.
func (l *line) change(ctx context.Context, gone bool) (time.Duration, error) {
	began := time.Now()
	l.to.Apply([]observer.Event{{Socket: l.next, Gone: gone}})
	at, err := l.wait(ctx)
	return at.Sub(began), err
}

func (l *line) wait(ctx context.Context) (time.Time, error) {
	select {
	case at := <-l.told:
		return at, nil
	case <-time.After(limit):
		return time.Time{}, fmt.Errorf("%s: nothing within %v", changeTime, limit)
	case <-ctx.Done():
		return time.Time{}, ctx.Err()
	}
}

// Name implements reconcile.Sink.
func (l *line) Name() string { return "bench" }

// Wake implements reconcile.Sink.
func (l *line) Wake() <-chan struct{} { return nil }

// Sync implements reconcile.Sink: all is as it should be at once.
func (l *line) Sync(_ context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	now := time.Now()
	out := make(port.Outcomes, len(change.Keys))
	for _, k := range change.Keys {
		if _, ok := want.Get(k); ok {
			out[k] = []port.Outcome{{Key: k, State: port.Active, HostAddress: k.AddrPort()}}
		}
	}
	if len(change.Keys) > 0 {
		l.told <- now
	}
	return out, nil
}
