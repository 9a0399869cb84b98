// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/host/hostpeer"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
)

// errFailing only sets the exit status: the report has the details.
var errFailing = errors.New("some checks failed: see the lines marked FAIL")

func newDoctor() *cobra.Command {
	var file, control string
	var host, verbose, selfTest bool
	var out output
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Diagnose this guest or host, and name remedies",
		Long: "Diagnose this machine. In a guest: privileges, kernel, sources, link; it works without a running agent.\n" +
			"On a host: the host peer, its guests, why one is refused, conflicts and reserved ports.\n\n" +
			"Exit status: 0 if nothing fails, 1 if something does, 2 usage error. Warnings do not count.",
		Example: "  fairlead doctor\n  fairlead doctor --host\n  fairlead doctor -o json",
		GroupID: groupCheck,
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if host && selfTest {
				return usageError{errors.New("--self-test is of the guest: want no --host with it")}
			}
			control := cmp.Or(control, os.Getenv(config.ClientControl))
			var r doctor.Report
			if host || !canBeGuest || !selfTest && isHost(c, control) {
				r = doctor.EvaluateHost(hostpeer.Facts(c.Context(), file, control))
			} else {
				r = doctorOfGuest(c.Context(), file, control, selfTest)
			}
			var err error
			if out.format == "json" {
				err = newEncoder(c.OutOrStdout()).Encode(versioned(r))
			} else {
				err = status.WriteDoctor(c.OutOrStdout(), r, status.Style{
					Wide: verbose, Width: width(c.OutOrStdout(), false), Paint: painter(c.OutOrStdout()),
				})
			}
			if err == nil && r.State == doctor.Failing {
				err = errFailing
			}
			return err
		},
	}
	c.Flags().StringVar(&file, "config", "", "configuration file of the agent or host (default: that which it uses)")
	c.Flags().StringVar(&control, "control", "", "control socket of the agent or host (default: $"+config.ClientControl+", else that of the configuration)")
	c.Flags().BoolVarP(&verbose, "verbose", "v", false, "show details of what works, too")
	c.Flags().BoolVar(&host, "host", !canBeGuest, "diagnose the host (default: what runs here)")
	if canBeGuest {
		c.Flags().BoolVar(&selfTest, "self-test", false, "try whether events of sockets and NAT rules arrive, in a network namespace made for that")
	}
	out.register(c, "text", "json")
	return c
}

// isHost reports whether a host peer is what runs here.
func isHost(c *cobra.Command, control string) bool {
	l, err := client(control).List(c.Context())
	return err == nil && l.Role == "host"
}
