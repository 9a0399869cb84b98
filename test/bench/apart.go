// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"os"
	"os/exec"

	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/program"
)

// scaleVariable is the scale of what a test in the emulated machine measures.
const scaleVariable = "FAIRLEAD_BENCH_SCALE"

// inVM measures flows over vsock in an emulated machine.
func inVM(ctx context.Context, b *bench) {
	b.progress("building and booting Linux")
	b.collect(exec.CommandContext(ctx, "go", "run", "github.com/fairlead/fairlead/test/vm", "-kernel", "6.12",
		"-tags", "vm,bench", "-run", "^TestMeasureVsock$", "-env", scaleVariable+"="+scales[b.scale],
		"github.com/fairlead/fairlead/test/bench"), (*exec.Cmd).Run)
}

// inEnclave returns a function that runs f with mounts and cgroups of its own, as engines
// need them: in another process, except if this is that process.
func inEnclave(f func(context.Context, *bench)) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		if enclave.Dir() != "" {
			f(ctx, b)
			return
		}
		cmd := exec.CommandContext(ctx, must(os.Executable()), "-emit", "-only", b.part.name, "-scale", scales[b.scale])
		cmd.Env = append(os.Environ(), program.Variable+"="+b.program)
		b.collect(cmd, enclave.Run)
	}
}
