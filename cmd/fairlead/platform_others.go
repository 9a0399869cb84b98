// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/status/doctor"
)

// canBeGuest reports whether this system can run an agent.
const canBeGuest = false

// doctorOfGuest is never called.
func doctorOfGuest(context.Context, string, string, bool) doctor.Report { return doctor.Report{} }

// start runs the command line, of which args[0] is the name of the program.
func start(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	return run(ctx, args[1:], stdout, stderr)
}

// platformCommands are hidden: they say where these programs run.
func platformCommands() []*cobra.Command {
	var list []*cobra.Command
	for _, name := range []string{"agent", "publish", "demo"} {
		list = append(list, &cobra.Command{
			Use: name, Hidden: true, DisableFlagParsing: true,
			RunE: func(*cobra.Command, []string) error {
				return usageError{fmt.Errorf("`fairlead %s` runs on Linux, in the guest; in WSL: wsl --user root fairlead %[1]s", name)}
			},
		})
	}
	return list
}
