// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
)

const (
	startTime  = "start of the program → all ports at the other end of the link"
	binarySize = "size of the binary, stripped"
)

// One listener is there so that there is something to wait for.
var startSizes = []int{1, 10_000}

func startPart() part {
	tried := modes[:2] // the first poll comes at once, whatever the interval
	return part{"start", "start", []measure{
		{name: startTime, unit: "s", modes: ownModes[:2], sizes: startSizes, sizeUnit: "ports"},
	}, func(ctx context.Context, b *bench) error {
		for _, n := range b.sizes(startSizes) {
			for range b.of(12, 6, 1) {
				for _, m := range tried {
					if err := b.start(ctx, m, n); err != nil {
						return err
					}
				}
			}
		}
		return nil
	}}
}

// start starts an agent in a guest that has n ports.
func (b *bench) start(ctx context.Context, m mode, n int) error {
	g, err := b.newGuest(m, nil)
	if err != nil {
		return err
	}
	defer g.close()
	if _, err := g.fill(n); err != nil {
		return err
	}
	began := time.Now()
	if err := g.start(); err != nil {
		return err
	}
	for g.peer == nil {
		if g.peer, err = newPeer(ctx, g.link); err != nil && time.Since(began) > limit {
			return err
		}
		if err := schedule.Sleep(ctx, time.Millisecond); err != nil {
			return err
		}
	}
	last, err := g.peer.settle(ctx, n)
	if err != nil {
		return err
	}
	b.add(startTime, m.name, n, last.Sub(began).Seconds())
	if err := g.ready(ctx); err != nil {
		return err
	}
	return g.check(ctx)
}

func binaryPart() part {
	return part{"binary", "start", []measure{{name: binarySize, unit: "B", modes: []string{"fairlead"}}}, func(ctx context.Context, b *bench) error {
		path := filepath.Join(b.dir, "stripped")
		build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "github.com/fairlead/fairlead/cmd/fairlead")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("build: %w: %s", err, out)
		}
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		b.add(binarySize, "fairlead", 0, float64(info.Size()))
		return nil
	}}
}
