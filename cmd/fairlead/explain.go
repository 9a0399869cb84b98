// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/status"
)

func newExplain() *cobra.Command {
	var control string
	var noDial bool
	var out output
	c := &cobra.Command{
		Use:   "explain PORT[/tcp|/udp]",
		Short: "Say why a port is, or is not, reachable on the host, and what to do next",
		Args:  oneArg("a port such as 8080 or 53/udp"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			q, err := status.ParseQuery(args[0])
			if err != nil {
				return usageError{err}
			}
			q.Dial = !noDial
			r, err := client(control).Explain(c.Context(), q)
			if err != nil {
				return err
			}
			if out.format == "json" {
				return json.NewEncoder(c.OutOrStdout()).Encode(r)
			}
			return status.WriteReport(c.OutOrStdout(), r, painter(c.OutOrStdout()), time.Now())
		},
	}
	controlFlag(c, &control)
	c.Flags().BoolVar(&noDial, "no-dial", false, "do not try whether the server answers (TCP only)")
	out.register(c, "text", "json")
	return c
}
