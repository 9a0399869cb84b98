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

	"github.com/fairlead/fairlead/test/bench/report"
)

const (
	startMeasure  = "start of the program → all ports at the other end of the link"
	binaryMeasure = "size of the binary, stripped"
)

func startPart() Part {
	return Part{
		Section: report.Section{
			Name: "start", Title: "How soon a started agent has told all",
			About: `The time from the start of the program to the moment that all ports of the guest have
arrived at the other end of the link, with one listener in the guest (so that there is something to wait for) and with
10,000. The other end tries to connect each millisecond. Modes take turns.`,
		},
		Run: start,
	}
}

func start(ctx context.Context, e *Env) error {
	tried := modes[:2] // how long the next poll is away does not matter to the first
	for _, n := range []int{1, 10_000} {
		if e.Scale == Tiny && n > 1 {
			break
		}
		samples, errs, by := make([][]float64, len(tried)), make([]error, len(tried)), make([]string, len(tried))
		for range e.Of(12, 6, 2) {
			for i, m := range tried {
				if errs[i] != nil {
					continue
				}
				var took time.Duration
				took, by[i], errs[i] = startOnce(ctx, e, m, n)
				samples[i] = append(samples[i], took.Seconds())
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		for i, m := range tried {
			c := report.Cell{Measure: startMeasure, Mode: m.name, Size: float64(n), SizeUnit: "ports", Unit: "s", By: by[i]}
			if errs[i] != nil {
				e.Fail(c, errs[i])
				continue
			}
			e.Samples(c, samples[i])
		}
	}
	if e.Scale == Tiny {
		return nil // it takes a build
	}
	return binarySize(ctx, e)
}

// binarySize builds the program as "make build" does.
func binarySize(ctx context.Context, e *Env) error {
	dir, err := e.Dir()
	if err != nil {
		return err
	}
	c := report.Cell{Measure: binaryMeasure, Mode: "fairlead", Unit: "B"}
	path := filepath.Join(dir, "fairlead")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "github.com/fairlead/fairlead/cmd/fairlead")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		e.Fail(c, fmt.Errorf("build: %w: %s", err, out))
		return nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	e.Value(c, float64(info.Size()))
	return nil
}

// startOnce starts an agent in a guest that has n ports.
func startOnce(ctx context.Context, e *Env, m mode, n int) (took time.Duration, by string, err error) {
	dir, err := e.Dir()
	if err != nil {
		return 0, "", err
	}
	g, err := newSpaces(dir, m)
	if err != nil {
		return 0, "", err
	}
	defer g.close()
	open, _, err := fill(g.space, n, firstPort)
	if err != nil {
		return 0, "", err
	}
	defer open.close()
	began := time.Now()
	if err := g.begin(e.Program); err != nil {
		return 0, "", err
	}
	var p *peer
	for p == nil {
		if p, err = newPeer(ctx, g); err != nil {
			if ctx.Err() != nil || time.Since(began) > readyWithin {
				return 0, "", err
			}
			time.Sleep(time.Millisecond)
		}
	}
	defer p.close()
	last, err := p.settled(ctx, n)
	if err != nil {
		return 0, "", err
	}
	if by, err = g.ready(ctx); err == nil {
		err = g.check(ctx)
	}
	return last.Sub(began), by, err
}
