// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/config/words"
	"github.com/fairlead/fairlead/internal/status"
)

func newLogLevel() *cobra.Command {
	root := &cobra.Command{Use: "loglevel", Short: "Print or set the log level of a running agent or host", Args: noArgs,
		Example: "  fairlead config loglevel get\n  fairlead config loglevel set debug --for 10m",
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() }}
	root.AddCommand(newLogLevelGet(), newLogLevelSet())
	return root
}

func newLogLevelGet() *cobra.Command {
	var control string
	var out output
	c := &cobra.Command{Use: "get", Short: "Print the log level, and those that are set for a time", Args: noArgs,
		Example: "  fairlead config loglevel get\n  fairlead config loglevel get -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			s, err := client(control).LogLevels(c.Context())
			switch {
			case err != nil:
				return err
			case out.format == "json":
				return newEncoder(c.OutOrStdout()).Encode(versioned(s))
			}
			return writeLevels(c.OutOrStdout(), s, time.Now())
		}}
	controlFlag(c, &control)
	out.register(c, "text", "json")
	return c
}

// writeLevels prints the level of the whole, and a line for each that ends.
func writeLevels(w io.Writer, s loglevel.State, now time.Time) error {
	if _, err := fmt.Fprintln(w, s.Level); err != nil {
		return err
	}
	for _, t := range s.Temporary {
		what := "of all"
		if t.Component != "" {
			what = "of " + t.Component
		}
		left := max(0, t.Until.Sub(now)).Round(time.Second)
		if _, err := fmt.Fprintf(w, "%s %s for another %s\n", t.Level, what, left); err != nil {
			return err
		}
	}
	return nil
}

func newLogLevelSet() *cobra.Command {
	var control string
	var r loglevel.Request
	c := &cobra.Command{Use: "set LEVEL", Short: "Set the log level: debug, info, warn or error", Args: oneArg("a log level"),
		Long: "Set the log level: debug, info, warn or error.\n\n" +
			"Components are parts of fairlead: sources, sinks and packages. A line at debug level names its own. Their levels\n" +
			"end by themselves, after 10 minutes if --for is not given; that of the whole remains until the process ends.",
		Example:   "  fairlead config loglevel set debug\n  fairlead config loglevel set debug --for 10m\n  fairlead config loglevel set debug --component nat,docker",
		ValidArgs: loglevel.Names(),
		RunE: func(c *cobra.Command, args []string) error {
			r.Level = args[0]
			if err := checkLevel(c, &r); err != nil {
				return usageError{err}
			}
			if err := setLevel(c.Context(), client(control), r); err != nil {
				return err
			}
			_, err := fmt.Fprintln(c.OutOrStdout(), r.Level)
			return err
		}}
	c.Flags().DurationVar(&r.Lasts, "for", 0, "restore the previous level after this time, such as 10m")
	c.Flags().StringSliceVar(&r.Components, "component", nil, "set the level of this `COMPONENT` alone, such as nat (may be repeated)")
	controlFlag(c, &control)
	completeWords(c, map[string][]string{"component": loglevel.Components()})
	return c
}

// setLevel sets the level of components, or of the whole.
func setLevel(ctx context.Context, control *status.Client, r loglevel.Request) (err error) {
	if len(r.Components) > 0 {
		_, err = control.SetLogLevels(ctx, r)
		return err
	}
	_, err = control.LogLevel(ctx, r.Level, r.Lasts)
	return err
}

// checkLevel returns why a request makes no sense, and completes it.
func checkLevel(c *cobra.Command, r *loglevel.Request) error {
	if !slices.Contains(loglevel.Names(), r.Level) {
		return fmt.Errorf("log level %q: want %s%s", r.Level, words.OneOf(loglevel.Names()), words.Suggest(r.Level, loglevel.Names()))
	}
	if c.Flags().Changed("component") && len(r.Components) == 0 {
		return fmt.Errorf("--component \"\": want one of %s", strings.Join(loglevel.Components(), ", "))
	}
	for _, name := range r.Components {
		if known := loglevel.Components(); !slices.Contains(known, name) {
			return fmt.Errorf("--component %q: want one of %s%s", name, strings.Join(known, ", "), words.Suggest(name, known))
		}
	}
	given := c.Flags().Changed("for")
	if !given && len(r.Components) > 0 {
		r.Lasts = loglevel.LastsDefault
	}
	if (given || r.Lasts != 0) && (r.Lasts < loglevel.LastsMin || r.Lasts > loglevel.LastsMax) {
		return fmt.Errorf("--for %s: want %s to %s", r.Lasts, loglevel.LastsMin, loglevel.LastsMax)
	}
	return nil
}
