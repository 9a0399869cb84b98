// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/bench/report"
)

const missedMeasure = "ports that were seen"

// lifetimes are how long a port lives.
var lifetimes = []time.Duration{time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond, time.Second, 5 * time.Second}

func missedPart() Part {
	return Part{
		Section: report.Section{
			Name: "missed", Title: "Which ports are seen at all",
			About: `Listeners that live for a while, opened at random moments, and the share of them that
the other end of the link was told of. A test server, a debugger's port or a port that an OAuth login waits
at may live for less than a second. A port that is gone before its message is made is not told, and need not be.`,
			Figures: []report.Figure{
				{File: "missed", Title: "Ports that were seen", Measure: missedMeasure, Kind: report.Lines, X: "how long the port lives, ms", Y: "share", LogX: true},
			},
		},
		Run: missed,
	}
}

func missed(ctx context.Context, e *Env) error {
	ls, errs := linkedModes(ctx, e, 0)
	defer closeAll(ls)
	n, window := e.Of(200, 100, 5), e.For(20*time.Second, 10*time.Second, time.Second)
	e.Progress("%d ports of each lifetime within %v", n, window)
	var wg sync.WaitGroup
	var mu sync.Mutex
	for i, l := range ls {
		if errs[i] != nil {
			continue
		}
		for j, life := range lifetimes {
			for k := range n {
				wg.Go(func() {
					err := pause(ctx, rand.N(window))
					if err == nil {
						err = live(l, uint16(firstPort+j*n+k), life)
					}
					if err != nil {
						mu.Lock()
						errs[i] = err
						mu.Unlock()
					}
				})
			}
		}
	}
	wg.Wait()
	if err := pause(ctx, 3500*time.Millisecond); err != nil { // the slowest poller looks once more
		return err
	}
	for i, l := range ls {
		if errs[i] == nil {
			errs[i] = l.check(ctx)
		}
	}
	for j, life := range lifetimes {
		for i, m := range modes {
			c := report.Cell{Measure: missedMeasure, Mode: m.name, Size: 1e3 * life.Seconds(), SizeUnit: "ms alive", Unit: "%"}
			if errs[i] != nil {
				e.Fail(c, errs[i])
				continue
			}
			seen := 0
			for k := range n {
				if ls[i].peer.saw(tcpKey(uint16(firstPort + j*n + k))) {
					seen++
				}
			}
			c.By, c.Extra = ls[i].by, map[string]float64{"ports": float64(n)}
			e.Value(c, 100*float64(seen)/float64(n))
		}
	}
	return nil
}

// live opens a port for a while.
func live(l *linked, p uint16, life time.Duration) error {
	fd, opened, err := open(l.space, tcpKey(p))
	if err != nil {
		return fmt.Errorf("port %d: %w", p, err)
	}
	time.Sleep(time.Until(opened.Add(life)))
	return unix.Close(fd)
}
