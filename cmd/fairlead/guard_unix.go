// SPDX-License-Identifier: Apache-2.0

//go:build unix

package main

import (
	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/run/exec"
)

// guards is what the host peer starts for each program of run.allow.
func guards() []*cobra.Command {
	return []*cobra.Command{{
		Use: exec.GuardCommand, Hidden: true, Args: noArgs,
		RunE: func(*cobra.Command, []string) error { return exec.Guard() },
	}}
}
