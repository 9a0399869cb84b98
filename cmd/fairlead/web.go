// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/status"
)

func newWeb() *cobra.Command {
	var control, addr string
	c := &cobra.Command{
		Use: "web", Short: "Print the URL of the status page; serve it until Ctrl-C if the agent does not", Args: noArgs, GroupID: groupInspect,
		Example: "  fairlead web\n  fairlead web --addr 127.0.0.1:7420",
		RunE: func(c *cobra.Command, _ []string) error {
			at, err := netip.ParseAddrPort(addr)
			if err != nil || !at.Addr().IsLoopback() {
				return usageError{fmt.Errorf("--addr %q: want a loopback address such as \"127.0.0.1:7420\"", addr)}
			}
			cl := client(control)
			url, err := cl.WebURL(c.Context())
			if err != nil {
				return err
			}
			if url != "" && !c.Flags().Changed("addr") {
				_, err = fmt.Fprintln(c.OutOrStdout(), url)
				return err
			}
			l, err := (&net.ListenConfig{}).Listen(c.Context(), "tcp", at.String())
			if err != nil {
				return fmt.Errorf("page: %w: choose another --addr", err)
			}
			return status.Relay(c.Context(), cl, l, func(url string) {
				_, _ = fmt.Fprintf(c.OutOrStdout(), "%s\n", url)
				_, _ = fmt.Fprintln(c.ErrOrStderr(), "Serving the page until Ctrl-C. Anybody with this URL can read it.")
			})
		},
	}
	controlFlag(c, &control)
	c.Flags().StringVar(&addr, "addr", "127.0.0.1:0", "loopback address to serve the page at")
	return c
}
