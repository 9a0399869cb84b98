// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/status"
)

// output is a -o flag with the formats that a command knows.
type output struct {
	format string
	known  []string
}

func (o *output) register(c *cobra.Command, known ...string) {
	o.known = known
	c.Flags().StringVarP(&o.format, "output", "o", known[0], fmt.Sprintf("one of %q", known))
}

func (o *output) validate() error {
	for _, k := range o.known {
		if o.format == k {
			return nil
		}
	}
	return usageError{fmt.Errorf("--output %q: want one of %q", o.format, o.known)}
}

func controlFlag(c *cobra.Command, path *string) {
	c.Flags().StringVar(path, "control", "", "control socket of the agent or host to ask (default: $FAIRLEAD_CONTROL, else the agent's, else the host's)")
}

// client returns a client of the control socket that path names, or else of
// the one that is there.
func client(path string) *status.Client {
	path = cmp.Or(path, os.Getenv("FAIRLEAD_CONTROL"))
	if path == "" {
		path = config.DefaultAgent().Control
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			if host := config.DefaultHost().Control; host != "" {
				if _, err := os.Stat(host); err == nil {
					path = host
				}
			}
		}
	}
	return status.NewClient(path)
}

func newLs() *cobra.Command {
	var control string
	var out output
	c := &cobra.Command{
		Use: "ls", Short: "List the ports, where they are reachable, and who serves them", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			l, err := client(control).List(c.Context())
			if err != nil {
				return err
			}
			if out.format == "json" {
				return json.NewEncoder(c.OutOrStdout()).Encode(l)
			}
			return status.WriteTable(c.OutOrStdout(), l, out.format == "wide", time.Now())
		},
	}
	controlFlag(c, &control)
	out.register(c, "table", "wide", "json")
	return c
}

func newWatch() *cobra.Command {
	var control string
	var out output
	c := &cobra.Command{
		Use: "watch", Short: "Show ports as they come, change and go", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			return watch(c.Context(), client(control), out.format == "json", c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	controlFlag(c, &control)
	out.register(c, "text", "json")
	return c
}

// reconnectPause is how long watch waits before it looks for a restarted agent.
const reconnectPause = 500 * time.Millisecond

// watch prints events and survives a restart of what it watches, but not its
// absence at the start.
func watch(ctx context.Context, cl *status.Client, asJSON bool, stdout, stderr io.Writer) error {
	enc := json.NewEncoder(stdout)
	connected, told := false, false
	for {
		err := cl.Watch(ctx, func(e status.Event) error {
			if told {
				_, _ = fmt.Fprintln(stderr, "fairlead: connected again")
			}
			connected, told = true, false
			if asJSON {
				return enc.Encode(e)
			}
			return status.WriteEvent(stdout, e)
		})
		lost := errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, status.ErrNotRunning)
		if ctx.Err() != nil || !connected || !lost {
			return err
		}
		if !told {
			_, _ = fmt.Fprintln(stderr, "fairlead: connection lost, waiting for it to come back")
			told = true
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(reconnectPause):
		}
	}
}

func newLogLevel() *cobra.Command {
	var control string
	root := &cobra.Command{Use: "loglevel", Short: "Show or set the log level of a running agent or host", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	level := func(c *cobra.Command, set string) error {
		l, err := client(control).LogLevel(c.Context(), set)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(c.OutOrStdout(), l)
		return err
	}
	get := &cobra.Command{Use: "get", Short: "Print the log level", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return level(c, "") }}
	set := &cobra.Command{Use: "set LEVEL", Short: "Set the log level: debug, info, warn or error", Args: oneArg("a log level"),
		RunE: func(c *cobra.Command, args []string) error { return level(c, args[0]) }}
	controlFlag(get, &control)
	controlFlag(set, &control)
	root.AddCommand(get, set)
	return root
}
