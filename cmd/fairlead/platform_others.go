// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/diagnose/doctor"
)

// canBeGuest reports whether this system can run an agent.
const canBeGuest = false

// doctorOfGuest is never called.
func doctorOfGuest(context.Context, string, string) doctor.Report { return doctor.Report{} }

// start runs the command line, of which args[0] is the name of the program.
func start(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	return run(ctx, args[1:], stdout, stderr)
}

// platformCommands is empty: the agent and the demo need Linux.
func platformCommands() []*cobra.Command { return nil }
