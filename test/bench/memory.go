// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/status"
)

const (
	tableMemory = "Memory"
	bothMemory  = "MemoryOfBothFamilies"
	rulesMemory = "MemoryOfRules"
)

const modeHost = "host"

// Numbers of listeners, and of those that take both families.
var (
	tableSizes = []int{0, 10_000}
	bothSizes  = []int{10_000}
)

func memoryPart() part {
	return part{"memory", "idle", []measure{
		{name: tableMemory, title: "memory of an idle agent and of its host peer", unit: "RSS-B", modes: []string{modeBPF, modeHost}, sizes: tableSizes, sizeUnit: "listeners"},
		{name: bothMemory, title: "the same, of listeners of both families", unit: "RSS-B", modes: []string{modeBPF, modeHost}, sizes: bothSizes, sizeUnit: "listeners"},
		{name: rulesMemory, title: "memory of an idle agent before 20,000 NAT rules came, and after they went", unit: "RSS-B", modes: []string{"before", "after"}},
	}, tables}
}

// tables fills tables, and looks at the memory of their processes when these had time to
// give back what they need no more.
func tables(ctx context.Context, b *bench) {
	type pair struct {
		*guest
		host *process
		name string
		size int
	}
	var pairs []pair
	start := func(name string, size, rows int, fill func(*guest)) {
		g := b.newGuest(modes[0], b.space())
		g.start()
		g.ready(ctx)
		p := pair{g, g.startHost(), name, size}
		fill(g)
		check(eventually(ctx, func() error { return p.forwards(ctx, rows) }))
		g.handOver()
		pairs = append(pairs, p)
	}
	for _, n := range b.sizes(tableSizes) {
		start(tableMemory, n, n, func(g *guest) { g.fill(n) })
	}
	for _, n := range b.sizes(bothSizes) {
		start(bothMemory, n, 2*n, func(g *guest) { g.fillBoth(n) })
	}
	g := b.guest(ctx, modes[0], 0)
	rest := b.lasting(75*time.Second, 10*time.Second, time.Second)
	b.progress("leaving an agent alone for %v", rest)
	check(schedule.Sleep(ctx, rest))
	b.add(rulesMemory, "before", 0, memory(g.agent.used()))
	rules := b.of(20_000, 20_000, 100)
	table := newNATTable(b, g.space, rules)
	g.peer.settle(ctx, rules)
	table.clear()
	g.peer.settle(ctx, 0)
	rest = b.lasting(5*time.Minute, 30*time.Second, time.Second)
	b.progress("leaving all alone for %v", rest)
	check(schedule.Sleep(ctx, rest))
	b.add(rulesMemory, "after", 0, memory(g.agent.used()))
	for _, p := range pairs {
		b.add(p.name, modeBPF, p.size, memory(p.agent.used()))
		b.add(p.name, modeHost, p.size, memory(p.host.used()))
	}
	// To answer takes memory, too.
	g.checkNAT(ctx)
	for _, p := range pairs {
		p.check(ctx)
	}
}

// forwards fails unless the host peer forwards n publications.
func (g *guest) forwards(ctx context.Context, n int) error {
	l, err := status.NewClient(filepath.Join(g.dir, "host", "s")).List(ctx)
	if err != nil {
		return err
	}
	got := 0
	for _, p := range l.Publications {
		if p.State == port.Active {
			got++
		}
	}
	if got != n {
		return fmt.Errorf("the host forwards %d publications, want %d", got, n)
	}
	return nil
}
