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
	// The flag was registered in the line before, which is the one error there is.
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(known, cobra.ShellCompDirectiveNoFileComp))
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
				if _, err := os.Stat(host); !errors.Is(err, os.ErrNotExist) { // Windows may not look into a socket
					path = host
				}
			}
		}
	}
	return status.NewClient(path)
}

func filterFlag(c *cobra.Command, terms *[]string) {
	c.Flags().StringArrayVar(terms, "filter", nil,
		"show what matches: a word, or KEY=VALUE with port, protocol, address, state, owner, source or guest (may be repeated)")
}

// restartPatience is how long ls waits for an agent that restarts.
const restartPatience = time.Second

func newLs() *cobra.Command {
	var control string
	var terms []string
	var out output
	c := &cobra.Command{
		Use: "ls", Short: "List the ports, where they are reachable, and who serves them", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			filter, err := status.ParseFilter(terms)
			if err != nil {
				return usageError{err}
			}
			l, err := client(control).Await(c.Context(), restartPatience)
			if err != nil {
				return err
			}
			l = filter.List(l)
			if out.format == "json" {
				return json.NewEncoder(c.OutOrStdout()).Encode(l)
			}
			return status.WriteTable(c.OutOrStdout(), l, status.Style{
				Wide: out.format == "wide", Paint: painter(c.OutOrStdout()), Now: time.Now(),
			})
		},
	}
	controlFlag(c, &control)
	filterFlag(c, &terms)
	out.register(c, "table", "wide", "json")
	return c
}

func newWatch() *cobra.Command {
	var control string
	var terms []string
	var out output
	c := &cobra.Command{
		Use: "watch", Short: "Show ports as they come, change and go", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			filter, err := status.ParseFilter(terms)
			if err != nil {
				return usageError{err}
			}
			w := watcher{client: client(control), stderr: c.ErrOrStderr()}
			enc, paint := json.NewEncoder(c.OutOrStdout()), painter(c.OutOrStdout())
			w.tell = func(e status.Event) error {
				switch {
				case e.Publication != nil && !filter.Match(*e.Publication):
					return nil
				case out.format == "json":
					return enc.Encode(e)
				}
				return status.WriteEvent(c.OutOrStdout(), e, paint)
			}
			return w.run(c.Context())
		},
	}
	controlFlag(c, &control)
	filterFlag(c, &terms)
	out.register(c, "text", "json")
	return c
}

// reconnectPause is how long watch waits before it looks for a restarted agent.
const reconnectPause = 500 * time.Millisecond

// watcher tells events and survives a restart of what it watches, but not its
// absence at the start. After a restart it tells what differs.
type watcher struct {
	client *status.Client
	tell   func(status.Event) error
	stderr io.Writer
}

func (w watcher) run(ctx context.Context) error {
	var story status.Resume
	connected, told := false, false
	for {
		err := w.client.Watch(ctx, func(e status.Event) error {
			if told {
				_, _ = fmt.Fprintln(w.stderr, "fairlead: connected again")
			}
			connected, told = true, false
			for _, e := range story.Events(e) {
				if err := w.tell(e); err != nil {
					return err
				}
			}
			return nil
		})
		lost := errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, status.ErrNotRunning)
		if ctx.Err() != nil || !connected || !lost {
			return err
		}
		story.Lost()
		if !told {
			_, _ = fmt.Fprintln(w.stderr, "fairlead: connection lost, waiting for it to come back")
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
	var lasts time.Duration
	root := &cobra.Command{Use: "loglevel", Short: "Show or set the log level of a running agent or host", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	level := func(c *cobra.Command, set string) error {
		l, err := client(control).LogLevel(c.Context(), set, lasts)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(c.OutOrStdout(), l)
		return err
	}
	get := &cobra.Command{Use: "get", Short: "Print the log level", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return level(c, "") }}
	set := &cobra.Command{Use: "set LEVEL", Short: "Set the log level: debug, info, warn or error", Args: oneArg("a log level"),
		ValidArgs: []string{"debug", "info", "warn", "error"},
		RunE: func(c *cobra.Command, args []string) error {
			if lasts != 0 && (lasts < status.LevelLastsMin || lasts > status.LevelLastsMax) {
				return usageError{fmt.Errorf("--for %s: want %s to %s", lasts, status.LevelLastsMin, status.LevelLastsMax)}
			}
			return level(c, args[0])
		}}
	set.Flags().DurationVar(&lasts, "for", 0, "go back to the level before after this time, such as 10m")
	controlFlag(get, &control)
	controlFlag(set, &control)
	root.AddCommand(get, set)
	return root
}
