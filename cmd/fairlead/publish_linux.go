// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/guest/publish"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

func newPublish() *cobra.Command {
	var r publish.Request
	var socket string
	c := &cobra.Command{
		Use:   "publish PORT[/tcp]",
		Short: "In a container, reach a port of the guest, or publish one of its own on the host",
		Long: "In a container, reach a port of the guest's loopback at the container's own loopback, or\n" +
			"with --to-host have a port of the container published on the host.\n\n" +
			"The container needs nothing but the agent's socket, mounted, and an entry in `publish.allow` of\n" +
			"the agent's configuration. The port is there for as long as this program runs.",
		Example: "  fairlead publish 5432\n  fairlead publish 5432 --as 15432\n  fairlead publish 8000 --to-host --as 3000",
		GroupID: groupRun,
		Args:    oneArg("a port such as 8080"),
		RunE: func(c *cobra.Command, args []string) error {
			q, err := status.ParseQuery(args[0])
			if err != nil {
				return usageError{err}
			}
			if q.Protocol == port.UDP {
				return usageError{fmt.Errorf("port %q: only TCP ports can be published", args[0])}
			}
			r.Port, r.As = q.Port, cmp.Or(r.As, q.Port)
			err = publish.Hold(c.Context(), socket, r, func() { _, _ = fmt.Fprintln(c.OutOrStdout(), granted(r)) })
			if err != nil {
				return fmt.Errorf("publish %d: %w", r.Port, err)
			}
			return nil
		},
	}
	c.Flags().Uint16Var(&r.As, "as", 0, "port of the container's loopback, or with --to-host of the host (default PORT)")
	c.Flags().BoolVar(&r.ToHost, "to-host", false, "publish a port of this container on the host")
	c.Flags().StringVar(&socket, "socket", publish.DefaultSocket, "path of the agent's socket in this container")
	return c
}

// granted says what a request led to.
func granted(r publish.Request) string {
	if r.ToHost {
		return fmt.Sprintf("Port %d of this container is published for port %d of the host.", r.Port, r.As)
	}
	return fmt.Sprintf("127.0.0.1:%d leads to port %d of the guest.", r.As, r.Port)
}
