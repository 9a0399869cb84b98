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
	return part{"start", "start", []measure{
		{name: startTime, unit: "s", modes: ownModes[:2], sizes: startSizes, sizeUnit: "ports"},
	}, func(ctx context.Context, b *bench) {
		for _, n := range b.sizes(startSizes) {
			for range b.of(12, 6, 1) {
				for _, m := range modes[:2] { // the first poll comes at once, whatever the interval
					b.start(ctx, m, n)
				}
			}
		}
	}}
}

// start starts an agent in a guest that has n ports.
func (b *bench) start(ctx context.Context, m mode, n int) {
	g := b.newGuest(m, nil)
	defer g.close()
	g.fill(n)
	began := time.Now()
	g.start()
	for {
		var err error
		if g.peer, err = newPeer(ctx, g.link); err == nil {
			break
		}
		if time.Since(began) > limit {
			check(err)
		}
		check(schedule.Sleep(ctx, time.Millisecond))
	}
	b.add(startTime, m.name, n, g.peer.settle(ctx, n).Sub(began).Seconds())
	g.ready(ctx)
	g.check(ctx)
}

func binaryPart() part {
	return part{"binary", "start", []measure{{name: binarySize, unit: "B", modes: []string{"fairlead"}}}, func(ctx context.Context, b *bench) {
		path := filepath.Join(b.tempDir(), "fairlead")
		build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "github.com/fairlead/fairlead/cmd/fairlead")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			check(fmt.Errorf("build: %w: %s", err, out))
		}
		b.add(binarySize, "fairlead", 0, float64(must(os.Stat(path)).Size()))
	}}
}
