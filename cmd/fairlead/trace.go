// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/status"
)

func newTrace() *cobra.Command {
	var control string
	var payload int
	var out output
	c := &cobra.Command{
		Use:   "trace PORT[/tcp|/udp]",
		Short: "Print the connections of a port as they open, move bytes and close",
		Long: "Print the connections of a port as they open, move bytes and close, with the reason.\n\n" +
			"Connections that are open already are not shown. On a host, PORT is that of the guest or of the host.",
		Example: "  fairlead trace 8080\n  fairlead trace 53/udp -o json\n  fairlead trace 8080 --hex 64",
		GroupID: groupInspect,
		RunE: func(c *cobra.Command, args []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			filter, err := status.ParseTrace(args[0], payload)
			if err != nil {
				return usageError{err}
			}
			enc, paint := newEncoder(c.OutOrStdout()), painter(c.OutOrStdout())
			return runTrace(c.Context(), client(control), filter, func(line string) {
				_, _ = fmt.Fprintln(c.ErrOrStderr(), "fairlead: "+line)
			}, func(e trace.Event) error {
				if out.format == "json" {
					return enc.Encode(versioned(e))
				}
				return status.WriteTrace(c.OutOrStdout(), e, paint)
			})
		},
	}
	portArg(c, &control)
	controlFlag(c, &control)
	c.Flags().IntVar(&payload, "hex", 0, fmt.Sprintf("also show up to this many bytes that each side sends first, at most %d; they may be secret", trace.MaxHex))
	out.register(c, "text", "json")
	return c
}

func runTrace(ctx context.Context, client *status.Client, filter trace.Filter, note func(string), f func(trace.Event) error) error {
	if filter.Hex > 0 {
		note(fmt.Sprintf("warning: the first %d bytes of each side are shown; they may be passwords or other secrets", filter.Hex))
	}
	return client.Trace(ctx, filter, func() { note("tracing; connections that are open already are not shown") }, f)
}
