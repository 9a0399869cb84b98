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
	var readOnly bool
	c := &cobra.Command{
		Use: "web", Short: "Print the URL of the status page; serve it until Ctrl-C if the agent does not", Args: noArgs, GroupID: groupInspect,
		Long: "Print the URL of the status page; serve it until Ctrl-C if the agent does not.\n\n" +
			"Who has the URL can also change what is forwarded, as `fairlead forward`, `deny`, `allow` and `expose` do;\n" +
			"with --read-only not.",
		Example: "  fairlead web\n  fairlead web --addr 127.0.0.1:7420\n  fairlead web --read-only",
		RunE: func(c *cobra.Command, _ []string) error {
			at, err := netip.ParseAddrPort(addr)
			if err != nil || !at.Addr().IsLoopback() {
				return usageError{fmt.Errorf("--addr %q: want a loopback address such as \"127.0.0.1:7420\"", addr)}
			}
			cl := client(control)
			page, err := cl.WebAddress(c.Context())
			if err != nil {
				return err
			}
			url := page.URL
			if readOnly {
				url = page.ReadOnly
			}
			if url != "" && !c.Flags().Changed("addr") {
				_, err = fmt.Fprintln(c.OutOrStdout(), url)
				return err
			}
			l, err := (&net.ListenConfig{}).Listen(c.Context(), "tcp", at.String())
			if err != nil {
				return fmt.Errorf("page: %w: choose another --addr", err)
			}
			may := "read it, and change what is forwarded"
			if readOnly {
				may = "read it"
			}
			return status.Relay(c.Context(), cl, l, readOnly, func(url string) {
				_, _ = fmt.Fprintf(c.OutOrStdout(), "%s\n", url)
				_, _ = fmt.Fprintln(c.ErrOrStderr(), "Serving the page until Ctrl-C. Anybody with this URL can "+may+".")
			})
		},
	}
	controlFlag(c, &control)
	c.Flags().StringVar(&addr, "addr", "127.0.0.1:0", "loopback address to serve the page at")
	c.Flags().BoolVar(&readOnly, "read-only", false, "of a page that changes nothing")
	return c
}
