// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"os"
	"os/exec"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/test/kit/usage"
)

const (
	idleCPU   = "CPU of an idle agent"
	idleAwake = "seconds of a minute in which an idle agent wakes up"
	idleRSS   = "memory of an idle agent (RSS)"

	anonymous = "anonymous, MB"
)

// idleSizes are numbers of listeners, and of NAT rules.
var idleSizes = []int{0, 1000, 10_000}

func idlePart() part {
	of := "listeners and rules"
	return part{"idle", "idle", []measure{
		{name: idleCPU, unit: "%", modes: ownModes, sizes: idleSizes, sizeUnit: of, figure: "idle-cpu"},
		{name: idleAwake, unit: "per minute", modes: ownModes, sizes: idleSizes, sizeUnit: of},
		{name: idleRSS, unit: "B", modes: ownModes, sizes: idleSizes, sizeUnit: of},
	}, idle}
}

// idler is an agent that is left alone.
type idler struct {
	*guest
	size   int
	dumps  dumps // when it was ready
	before usage.Usage
	last   int64 // context switches a second ago
	awake  int   // seconds in which there were any
}

func idle(ctx context.Context, b *bench) {
	var all []*idler
	for _, n := range b.sizes(idleSizes) {
		for _, m := range modes {
			all = append(all, &idler{guest: b.busyGuest(ctx, m, n), size: n})
		}
	}
	for _, i := range all {
		i.dumps = i.dumped(ctx)
	}
	rest, lasts := b.lasting(75*time.Second, 10*time.Second, time.Second), b.lasting(2*time.Minute, 20*time.Second, time.Second)
	b.progress("leaving %d agents alone for %v, then watching them for %v", len(all), rest, lasts)
	check(schedule.Sleep(ctx, rest))
	for _, i := range all {
		i.before = i.used()
		i.last = i.before.Switches
	}
	for range int(lasts / time.Second) {
		check(schedule.Sleep(ctx, time.Second))
		for _, i := range all {
			if now := i.used(); now.Switches != i.last {
				i.last = now.Switches
				i.awake++
			}
		}
	}
	for _, i := range all {
		i.record(ctx)
	}
}

// busyGuest starts a guest with n listeners and n NAT rules.
func (b *bench) busyGuest(ctx context.Context, m mode, n int) *guest {
	g := b.guest(ctx, m, n)
	if n > 0 {
		g.handOver()
		newNATTable(b, g.space, n)
		g.peer.settle(ctx, 2*n) // a rule opens a port at the wildcard address
	}
	return g
}

// handOver makes another process hold the listeners of the guest: one process cannot
// have as many open files as all guests need.
func (g *guest) handOver() {
	cmd := exec.Command("sleep", "infinity")
	for _, fd := range g.fds {
		cmd.ExtraFiles = append(cmd.ExtraFiles, os.NewFile(uintptr(fd), "listener"))
	}
	check(cmd.Start())
	g.procs, g.fds = append(g.procs, cmd), nil
	for _, f := range cmd.ExtraFiles {
		_ = f.Close()
	}
}

func (i *idler) record(ctx context.Context) {
	now := i.used()
	i.check(ctx)
	cpu := now.Core(i.before)
	if i.mode.poll == 0 {
		cpu += i.dumped(ctx).longTerm(i.dumps)
	}
	i.b.add(idleCPU, i.mode.name, i.size, cpu)
	i.b.add(idleAwake, i.mode.name, i.size, float64(i.awake)/now.At.Sub(i.before.At).Minutes())
	i.b.add(idleRSS, i.mode.name, i.size, float64(now.RSS))
	i.b.extra(idleRSS, i.mode.name, i.size, anonymous, float64(now.Anon)/1e6)
}

// dumps are an agent's dumps of all sockets.
type dumps struct {
	n    float64
	took time.Duration
}

func (g *guest) dumped(ctx context.Context) dumps {
	m := must(g.metrics(ctx))
	return dumps{m[`fairlead_observer_dumps_total{result="ok"}`], time.Duration(m["fairlead_observer_dump_seconds_total"] * float64(time.Second))}
}

// longTerm is the share of a core, in percent, that background dumps take in the long
// term, by those since before. See observer.Options.Audit for how often they come.
func (d dumps) longTerm(before dumps) float64 {
	n := d.n - before.n
	if n == 0 {
		return 0
	}
	one := time.Duration(float64(d.took-before.took) / n)
	return 100 * one.Seconds() / max(time.Minute, min(30_000*one, 10*time.Minute)).Seconds()
}
