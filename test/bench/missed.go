// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/schedule"
)

const missedShare = "ports that were seen"

// lifetimes of ports, in milliseconds.
var lifetimes = []int{1, 10, 100, 1000, 5000}

func missedPart() part {
	return part{"missed", "missed", []measure{
		{name: missedShare, unit: "%", modes: ownModes, sizes: lifetimes, sizeUnit: "ms alive", figure: figure{"missed", lines}},
	}, missed}
}

// missed opens ports at random moments, and counts those that were reported.
func missed(ctx context.Context, b *bench) error {
	n, window := b.of(200, 100, 5), b.lasting(20*time.Second, 10*time.Second, time.Second)
	return b.each(ctx, 0, 0, func(ctx context.Context, g *guest) error {
		group, opening := errgroup.WithContext(ctx)
		for i, life := range b.sizes(lifetimes) {
			for j := range n {
				group.Go(func() error {
					if err := schedule.Sleep(opening, rand.N(window)); err != nil {
						return err
					}
					fd, opened, err := g.open(tcpKey(uint16(firstPort + i*n + j)))
					if err != nil {
						return err
					}
					time.Sleep(time.Until(opened.Add(time.Duration(life) * time.Millisecond)))
					return unix.Close(fd)
				})
			}
		}
		if err := group.Wait(); err != nil {
			return err
		}
		if err := schedule.Sleep(ctx, 3500*time.Millisecond); err != nil { // the slowest poller polls once more
			return err
		}
		for i, life := range b.sizes(lifetimes) {
			seen := 0
			for j := range n {
				if g.peer.saw(tcpKey(uint16(firstPort + i*n + j))) {
					seen++
				}
			}
			b.add(missedShare, g.mode.name, life, 100*float64(seen)/float64(n))
			b.extra(missedShare, g.mode.name, life, "ports", float64(n))
		}
		return nil
	})
}
