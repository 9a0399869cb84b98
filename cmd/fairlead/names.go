// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/status"
)

func newNames() *cobra.Command {
	var control string
	var out output
	c := &cobra.Command{
		Use: "names", Short: "List the names by which a host leads browsers to containers and Services", Args: noArgs, GroupID: groupInspect,
		Long: "List the names by which a host leads browsers to containers and Services: http://NAME, and\n" +
			"http://PORT.NAME for one of several ports. `fairlead host --names 127.0.0.1:80` serves them.",
		Example: "  fairlead names\n  fairlead names -o json | jq -r '.names[].names[0]'",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			r, err := client(control).Names(c.Context())
			if err != nil {
				return err
			}
			if out.format == "json" {
				return newEncoder(c.OutOrStdout()).Encode(versioned(r))
			}
			return status.WriteNames(c.OutOrStdout(), r, status.Style{
				Width: width(c.OutOrStdout(), false), Paint: painter(c.OutOrStdout()), Now: time.Now(),
			})
		},
	}
	controlFlag(c, &control)
	out.register(c, "table", "json")
	return c
}
