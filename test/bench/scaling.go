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
)

const (
	perPublication = "memory of one publication"
	changeTime     = "one change, from the observer to the sink"
	changeAllocs   = "allocations for one change"
	changeBytes    = "memory allocated for one change"
)

// tableSizes are numbers of publications.
var tableSizes = []int{10, 100, 1000, 10_000, 100_000}

func scalingPart() part {
	of, only := "publications", []string{modeBPF}
	return part{"scaling", "scaling", []measure{
		{name: perPublication, unit: "B", modes: only, sizes: tableSizes, sizeUnit: of},
		{name: changeTime, unit: "s", modes: only, sizes: tableSizes, sizeUnit: of, figure: figure{"scaling-time", lines}},
		{name: changeAllocs, unit: "allocations", modes: only, sizes: tableSizes, sizeUnit: of, figure: figure{"scaling-allocations", lines}},
		{name: changeBytes, unit: "B", modes: only, sizes: tableSizes, sizeUnit: of},
	}, scaling}
}

func scaling(ctx context.Context, b *bench) {
	ctx, cancel := context.WithCancel(ctx)
	group, ctx := errgroup.WithContext(ctx)
	b.cleanup(func() {
		cancel()
		_ = group.Wait()
	})
	all := map[int]*pipeline{}
	for _, n := range b.sizes(tableSizes) {
		before := heap()
		all[n] = newPipeline(ctx, group, n)
		if n >= 1000 { // fewer are lost in the noise
			b.add(perPublication, modeBPF, n, float64(heap()-before)/float64(n))
		}
	}
	for range b.of(100, 40, 2) { // in turns
		for n, p := range all {
			b.changes(ctx, p, n)
		}
	}
}

// changes measures some changes in a table of n publications.
func (b *bench) changes(ctx context.Context, p *pipeline, n int) {
	const changes = 100
	var times []float64
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for i := range changes {
		began := time.Now()
		p.to.Apply([]observer.Event{{Socket: p.next, Gone: i%2 == 1}})
		times = append(times, p.wait(ctx).Sub(began).Seconds())
	}
	runtime.ReadMemStats(&after)
	b.add(changeTime, modeBPF, n, times...)
	b.add(changeAllocs, modeBPF, n, float64(after.Mallocs-before.Mallocs)/changes)
	b.add(changeBytes, modeBPF, n, float64(after.TotalAlloc-before.TotalAlloc)/changes)
}

// heap is the size of the heap without garbage.
func heap() int64 {
	runtime.GC()
	runtime.GC() // what finalizers kept
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// pipeline is the way of a change through an agent, without the kernel and the link. It
// is the observer at one end and the sink at the other.
type pipeline struct {
	handler chan observer.Handler
	to      observer.Handler
	synced  chan time.Time
	next    observer.Socket
}

// newPipeline starts a pipeline that knows n sockets.
func newPipeline(ctx context.Context, group *errgroup.Group, n int) *pipeline {
	p := &pipeline{handler: make(chan observer.Handler, 1), synced: make(chan time.Time, 1), next: anySocket(n)}
	log := slog.New(slog.DiscardHandler)
	src := must(socket.New(socket.Options{Observer: p, Own: func(uint64) bool { return false }, Logger: log}))
	reg := registry.New(registry.Options{Rules: config.DefaultAgent().Rules, Logger: log})
	rec := reconcile.New(reg.Publications(), []reconcile.Sink{p}, reconcile.Options{Ready: reg.Ready(), Logger: log})
	feed := reg.Feed(src.Name())
	group.Go(func() error { return src.Run(ctx, feed) })
	group.Go(func() error { return rec.Run(ctx) })
	p.to = <-p.handler
	set := make([]observer.Socket, n)
	for i := range set {
		set[i] = anySocket(i)
	}
	p.to.Replace(set)
	p.wait(ctx)
	if got := rec.Wanted().View().Len(); got != n {
		check(fmt.Errorf("%d publications of %d sockets", got, n))
	}
	return p
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

// wait waits until the sink was called, and returns when.
func (p *pipeline) wait(ctx context.Context) (at time.Time) {
	select {
	case at = <-p.synced:
	case <-ctx.Done():
		check(ctx.Err())
	}
	return at
}

// Run implements socket.Observer.
func (p *pipeline) Run(ctx context.Context, h observer.Handler) error {
	p.handler <- h
	<-ctx.Done()
	return nil
}

// Name implements reconcile.Sink.
func (p *pipeline) Name() string { return "bench" }

// Wake implements reconcile.Sink.
func (p *pipeline) Wake() <-chan struct{} { return nil }

// Sync implements reconcile.Sink: everything is active at once.
func (p *pipeline) Sync(_ context.Context, want reconcile.View, change reconcile.Change) (port.Outcomes, error) {
	now := time.Now()
	out := make(port.Outcomes, len(change.Keys))
	for _, k := range change.Keys {
		if _, ok := want.Get(k); ok {
			out[k] = []port.Outcome{{Key: k, State: port.Active, HostAddress: k.AddrPort()}}
		}
	}
	if len(change.Keys) > 0 {
		p.synced <- now
	}
	return out, nil
}
