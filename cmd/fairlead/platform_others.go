// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/diagnose/doctor"
)

// canBeGuest reports whether this system can run an agent.
const canBeGuest = false

// doctorOfGuest is never called.
func doctorOfGuest(context.Context, string, string) doctor.Report { return doctor.Report{} }

// platformCommands is empty: the agent and the demo need Linux.
func platformCommands() []*cobra.Command { return nil }
