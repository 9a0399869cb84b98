// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import "github.com/spf13/cobra"

// platformCommands is empty: the agent and the demo need Linux.
func platformCommands() []*cobra.Command { return nil }
