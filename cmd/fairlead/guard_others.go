// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package main

import "github.com/spf13/cobra"

// guards returns none: programs are run without.
func guards() []*cobra.Command { return nil }
