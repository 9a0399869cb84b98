// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/fairlead/fairlead/internal/version"
)

// newMan writes the manual pages for packages ("make man").
func newMan() *cobra.Command {
	return &cobra.Command{
		Use: "man DIR", Short: "Write the manual pages to a directory", Hidden: true, Args: oneArg("a directory"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return err
			}
			root := c.Root()
			root.DisableAutoGenTag = true
			date := time.Unix(0, 0).UTC() // for reproducible builds
			return doc.GenManTree(root, &doc.GenManHeader{
				Title: "FAIRLEAD", Section: "1", Source: "fairlead " + version.String(), Manual: "fairlead", Date: &date,
			}, args[0])
		},
	}
}
