// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/schedule"
)

const missedShare = "ports that were reported"

// lifetimes of ports, in milliseconds.
var lifetimes = []int{1, 10, 100, 1000, 5000}

func missedPart() part {
	return part{"missed", "missed", []measure{
		{name: missedShare, unit: "%", modes: ownModes, sizes: lifetimes, sizeUnit: "ms lifetime", figure: "missed"},
	}, missed}
}

// missed opens ports at random moments, and counts those that were reported.
func missed(ctx context.Context, b *bench) {
	type listener struct {
		port uint16
		life int
	}
	var all []listener
	n, window := b.of(200, 100, 5), b.lasting(20*time.Second, 10*time.Second, time.Second)
	for _, life := range b.sizes(lifetimes) {
		for range n {
			all = append(all, listener{firstPort + uint16(len(all)), life})
		}
	}
	b.each(ctx, 0, 0, func(ctx context.Context, g *guest) {
		together(ctx, all, func(ctx context.Context, l listener) {
			check(schedule.Sleep(ctx, rand.N(window)))
			fd, opened := g.open(tcpKey(l.port))
			time.Sleep(time.Until(opened.Add(time.Duration(l.life) * time.Millisecond)))
			_ = unix.Close(fd)
		})
		check(schedule.Sleep(ctx, 3500*time.Millisecond)) // the slowest poller polls once more
		seen := map[int]float64{}
		for _, l := range all {
			if g.peer.saw(tcpKey(l.port)) {
				seen[l.life]++
			}
		}
		for _, life := range b.sizes(lifetimes) {
			b.add(missedShare, g.mode.name, life, 100*seen[life]/float64(n))
			b.extra(missedShare, g.mode.name, life, "ports", float64(n))
		}
	})
}
