// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"os/exec"
)

func hookPart() part {
	// The modes say what the caller's namespace is to the observer.
	return part{"hook", "hook", []measure{
		{name: "Pair", title: "added to listen() and close()", unit: "sec/op", modes: []string{"unwatched", "burst", "idle"}},
	}, hooks}
}

// hooks runs the observer's own benchmark: no other process may be in between.
func hooks(ctx context.Context, b *bench) {
	args := []string{"test", "-tags", "root", "-run", "^$", "-bench", "^BenchmarkPair$", "-benchtime", "1x"}
	if b.scale == tiny {
		args = append(args, "-short")
	}
	b.collect(exec.CommandContext(ctx, "go", append(args, "github.com/fairlead/fairlead/internal/observer")...), (*exec.Cmd).Run)
}
