// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/status/version"
)

// versionTimeout is how long version waits for a running process.
const versionTimeout = time.Second

func newVersion() *cobra.Command {
	var licenses bool
	var control string
	c := &cobra.Command{
		Use: "version", Short: "Print the versions of this program and of what runs, or licences", Args: noArgs,
		Long: "Print the version of this program. If an agent or host peer runs here, print its version and that of\n" +
			"the other side, and what to update if they differ.",
		Example: "  fairlead version\n  fairlead version --licenses",
		RunE: func(c *cobra.Command, _ []string) error {
			if licenses {
				return writeNotices(c.OutOrStdout())
			}
			ctx, cancel := context.WithTimeout(c.Context(), versionTimeout)
			defer cancel()
			l, err := client(control).List(ctx)
			if err != nil { // nothing runs, or only root may ask
				l = status.List{}
			}
			return writeVersions(c.OutOrStdout(), version.String(), l)
		},
	}
	c.Flags().BoolVar(&licenses, "licenses", false, "print the licences of fairlead and of the libraries in it")
	controlFlag(c, &control)
	return c
}

// writeVersions prints our version, that of the process that runs here, and those of
// the other sides.
func writeVersions(w io.Writer, ours string, l status.List) error {
	lines := []string{"fairlead " + ours}
	add := func(what, version, advice string) {
		line := what + " " + status.Quote(version)
		if advice != "" {
			line += ": " + advice
		}
		lines = append(lines, line)
	}
	if l.Version != "" {
		advice := ""
		if l.Version != ours {
			advice = "restart it, to run this program"
		}
		add("running "+l.Role, l.Version, advice)
	}
	for _, p := range l.Peers {
		switch other := map[string]string{"agent": "host", "host": "guest"}[l.Role]; {
		case p.Version != "" && l.Role == "agent":
			add(other+" "+status.Quote(p.Name), p.Version, doctor.Mismatch(l.Version, p.Version))
		case p.Version != "":
			add(other+" "+status.Quote(p.Name), p.Version, doctor.Mismatch(p.Version, l.Version))
		case p.Code == string(link.RefusedVersion):
			add(other, "was refused", status.Quote(p.Error))
		}
	}
	_, err := fmt.Fprintln(w, strings.Join(lines, "\n"))
	return err
}
