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

const emulatedNAT = "NAT commit is sent → message on the link, in an emulated machine"

// The kernel has all hooks.
const emulatedKernel = "6.12"

// What a test in the emulated machine measures, and how much of it.
const partVariable, scaleVariable = "FAIRLEAD_BENCH_PART", "FAIRLEAD_BENCH_SCALE"

func emulatedPart() part {
	return part{"emulated", "emulated", []measure{
		{name: emulatedNAT, unit: "s", modes: []string{modeDump1, "fentry", "kprobe", "nfnetlink"}, sizes: natSizes[:2], sizeUnit: "rules"},
	}, inVM}
}

// inVM measures the part in an emulated machine.
func inVM(ctx context.Context, b *bench) {
	b.progress("building and booting Linux %s", emulatedKernel)
	b.collect(exec.CommandContext(ctx, "go", "run", "github.com/fairlead/fairlead/test/vm", "-kernel", emulatedKernel,
		"-tags", "vm,bench", "-run", "^TestMeasureInTheEmulatedMachine$",
		"-env", partVariable+"="+b.part.name, "-env", scaleVariable+"="+scales[b.scale],
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
