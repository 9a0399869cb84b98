// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/words"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/status"
)

// output is the -o flag of a command.
type output struct {
	format string
	known  []string
}

func (o *output) register(c *cobra.Command, known ...string) {
	o.known = known
	c.Flags().StringVarP(&o.format, "output", "o", known[0], "output format: "+words.OneOf(known))
	// The only error is an unknown flag.
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(known, cobra.ShellCompDirectiveNoFileComp))
}

func (o *output) validate() error {
	for _, k := range o.known {
		if o.format == k {
			return nil
		}
	}
	return usageError{fmt.Errorf("--output %q: want %s", o.format, words.OneOf(o.known))}
}

func controlFlag(c *cobra.Command, path *string) {
	c.Flags().StringVar(path, "control", "", "control socket of the agent or host to ask (default: $"+config.ClientControl+", else that of this machine's agent or host)")
}

// client returns a client of the control socket at path; by default of the agent's or
// the host's.
func client(path string) *status.Client {
	return status.NewClient(cmp.Or(path, os.Getenv(config.ClientControl), defaultControl(controls())))
}

// controls are the default control sockets in the order in which they are tried. Only
// root can ask an agent.
func controls() []string {
	agent, host := config.DefaultAgent().Control, config.DefaultHost().Control
	switch {
	case runtime.GOOS != "linux":
		return []string{host}
	case os.Geteuid() == 0:
		return []string{agent, host}
	}
	return []string{host, agent}
}

// defaultControl returns the first socket that is there, or else the first.
func defaultControl(paths []string) string {
	for _, path := range paths {
		if path == "" { // no home directory
			continue
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) { // on Windows the error may be another one
			return path
		}
	}
	return paths[0]
}

func filterFlag(c *cobra.Command, terms *[]string) {
	c.Flags().StringArrayVar(terms, "filter", nil,
		"show matching ports: a word, or KEY=VALUE with "+words.OneOf(status.FilterKeys())+" (may be repeated)")
	// The only error is an unknown flag.
	_ = c.RegisterFlagCompletionFunc("filter", completeFilter)
}

// completeFilter completes the keys of filters, and the values that are words.
func completeFilter(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
	words := map[string][]string{
		"state":    {port.Active.String(), port.Pending.String(), port.Denied.String(), port.Conflict.String(), port.Failed.String(), "lost"},
		"protocol": {port.TCP.String(), port.UDP.String()},
		"source":   config.Sources(),
	}
	key, _, hasKey := strings.Cut(typed, "=")
	if !hasKey {
		keys := status.FilterKeys()
		for i := range keys {
			keys[i] += "="
		}
		return keys, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	}
	var list []string
	for _, w := range words[key] {
		list = append(list, key+"="+w)
	}
	return list, cobra.ShellCompDirectiveNoFileComp
}

// completeWords completes flags whose values are known words.
func completeWords(c *cobra.Command, words map[string][]string) {
	for flag, list := range words {
		// The only error is an unknown flag.
		_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(list, cobra.ShellCompDirectiveNoFileComp))
	}
}

// restartTimeout is how long ls waits for an agent that restarts.
const restartTimeout = time.Second

func newLs() *cobra.Command {
	var control string
	var terms []string
	var all, quiet, bare, names bool
	var out output
	var cluster clusterQuery
	c := &cobra.Command{
		Use: "ls", Short: "List the ports, where they are reachable, and who serves them", Args: noArgs, GroupID: groupInspect,
		Long: "List the ports, where they are reachable, and who serves them.\n\n" +
			"AGE is how long the port is open; \">5m\" if it was open before fairlead saw it. On a terminal,\n" +
			"or if COLUMNS is set, long cells are truncated; `fairlead explain PORT` has the whole reason.\n" +
			"An agent lists all ports. A host lists what its guests publish, and with -a the other ports of its guests, too.\n\n" +
			"With --names a host lists the names by which it leads browsers to containers and Services: http://NAME, and\n" +
			"http://PORT.NAME for one of several ports. `fairlead host --names 127.0.0.1:80` serves them." + longCluster,
		Example: "  fairlead ls\n  fairlead ls -a\n  fairlead ls --names\n  fairlead ls --filter state=conflict\n  fairlead ls -o json | jq '.publications[].hostAddresses'",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if names {
				return listNames(c, control, out)
			}
			if quiet && c.Flags().Changed("output") {
				return usageError{errors.New("--quiet: want no --output with it")}
			}
			filter, err := status.ParseFilter(terms)
			if err != nil {
				return usageError{err}
			}
			if err := cluster.validate(c, "control", "all", "quiet"); err != nil {
				return err
			}
			if cluster.enabled {
				return cluster.ls(c, filter, out, bare)
			}
			l, err := client(control).Await(c.Context(), restartTimeout)
			if err != nil {
				return err
			}
			shown := l
			if !all {
				shown = l.Published()
			}
			empty := "No ports."
			if len(shown.Publications) > 0 {
				empty = "No ports match the filter."
			}
			if n := len(filter.List(l).Publications); n > 0 && !all {
				empty += fmt.Sprintf(" `fairlead ls -a` lists %d that the guests do not publish.", n)
			}
			l = filter.List(shown)
			switch {
			case quiet:
				return writeAddresses(c.OutOrStdout(), l)
			case out.format == "json":
				return newEncoder(c.OutOrStdout()).Encode(versioned(l))
			}
			return status.WriteTable(c.OutOrStdout(), l, status.Style{
				Wide: out.format == "wide", Width: width(c.OutOrStdout(), out.format == "wide"),
				Paint: painter(c.OutOrStdout()), Now: time.Now(), Empty: empty, All: all, Bare: bare,
			})
		},
	}
	controlFlag(c, &control)
	filterFlag(c, &terms)
	allFlag(c, &all)
	cluster.register(c)
	cluster.registerViolations(c)
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print only the host addresses of reachable ports, one per line")
	c.Flags().BoolVar(&bare, "no-headers", false, "print the table without its first line")
	c.Flags().BoolVar(&names, "names", false, "on a host that serves names, list these")
	out.register(c, "table", "wide", "json")
	return c
}

// listNames prints the names that a host serves.
func listNames(c *cobra.Command, control string, out output) error {
	for _, flag := range []string{"filter", "all", "quiet", "no-headers", "cluster", "violations", "file"} {
		if c.Flags().Changed(flag) {
			return usageError{fmt.Errorf("--%s: not with --names", flag)}
		}
	}
	r, err := client(control).Names(c.Context())
	if err != nil {
		return err
	}
	if out.format == "json" {
		return newEncoder(c.OutOrStdout()).Encode(versioned(r))
	}
	return status.WriteNames(c.OutOrStdout(), r, status.Style{
		Width: width(c.OutOrStdout(), out.format == "wide"), Paint: painter(c.OutOrStdout()), Now: time.Now(),
	})
}

// writeAddresses prints where ports are reachable, each address once.
func writeAddresses(w io.Writer, l status.List) error {
	seen := make(map[string]bool)
	for _, p := range l.Publications {
		for _, a := range p.HostAddresses {
			line := a.String()
			if p.Lost || seen[line+p.Protocol.String()] {
				continue
			}
			seen[line+p.Protocol.String()] = true
			if _, err := fmt.Fprintln(w, line); err != nil {
				return err
			}
		}
	}
	return nil
}

func allFlag(c *cobra.Command, all *bool) {
	c.Flags().BoolVarP(all, "all", "a", false, "on a host, also show the ports that guests do not publish, and why")
}

func newWatch() *cobra.Command {
	var control string
	var terms []string
	var all bool
	var out output
	var cluster clusterQuery
	var program string
	c := &cobra.Command{
		Use: "watch [--exec PROGRAM [-- ARGUMENT...]]", Short: "Print ports as they open, change and close", GroupID: groupInspect,
		Long: "Print ports as they open, change and close.\n\n" +
			"With --exec a program is run for each change, with the change on its standard input as -o json prints it;\n" +
			"what is there when the watch begins is no change. No shell reads its name and arguments. It runs once at a\n" +
			"time, in the order of the changes, for a minute at most; its output goes to standard error. If it fails,\n" +
			"that is printed there, and the next change follows. 256 changes can wait, then the oldest are dropped.",
		Example: "  fairlead watch\n  fairlead watch --filter owner=web -o json\n  fairlead watch --exec ./on-change -- --verbose",
		Args: func(c *cobra.Command, args []string) error {
			if program != "" && c.ArgsLenAtDash() == 0 {
				return nil
			}
			return noArgs(c, args)
		},
		RunE: func(c *cobra.Command, args []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			filter, err := status.ParseFilter(terms)
			if err != nil {
				return usageError{err}
			}
			if err := cluster.validate(c, "control", "all"); err != nil {
				return err
			}
			w := watcher{client: client(control), stderr: c.ErrOrStderr()}
			var commands *runner
			if program != "" {
				if commands, err = newRunner(program, args, w.stderr); err != nil {
					return err
				}
				stop := commands.start(c.Context())
				defer stop()
			}
			enc, paint, selection := newEncoder(c.OutOrStdout()), painter(c.OutOrStdout()), status.NewSelection(filter)
			w.report = func(e status.Event) error {
				if e.Publication != nil && e.Publication.Unpublished && !all || !selection.Selects(e) {
					return nil
				}
				if commands != nil {
					if err := commands.add(e); err != nil {
						return err
					}
				}
				if out.format == "json" {
					return enc.Encode(versioned(e))
				}
				return status.WriteEvent(c.OutOrStdout(), e, paint)
			}
			if cluster.enabled {
				return cluster.watch(c.Context(), w.report, w.stderr)
			}
			if l, err := w.client.List(c.Context()); err == nil { // else the watch says why
				_ = status.WritePeers(w.stderr, l, status.Style{Now: time.Now(), Paint: painter(w.stderr)})
			}
			return w.run(c.Context())
		},
	}
	controlFlag(c, &control)
	filterFlag(c, &terms)
	allFlag(c, &all)
	cluster.register(c)
	c.Flags().StringVar(&program, "exec", "", "run this `PROGRAM` for each change, with the change as JSON on its standard input")
	out.register(c, "text", "json")
	return c
}

// reconnectPause is between two attempts of watch to connect again.
const reconnectPause = 500 * time.Millisecond

// watcher reports events. It survives a restart of the agent, after which it reports
// the differences. At its own start the agent must be running.
type watcher struct {
	client *status.Client
	report func(status.Event) error
	stderr io.Writer
}

func (w watcher) run(ctx context.Context) error {
	var resume status.Resume
	connected, warned := false, false
	for {
		err := w.client.Watch(ctx, func(e status.Event) error {
			if warned {
				_, _ = fmt.Fprintln(w.stderr, "fairlead: reconnected")
			}
			connected, warned = true, false
			for _, e := range resume.Events(e) {
				if err := w.report(e); err != nil {
					return err
				}
			}
			return nil
		})
		lost := errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, status.ErrNotRunning)
		if ctx.Err() != nil || !connected || !lost {
			return err
		}
		resume.Lost()
		if !warned {
			_, _ = fmt.Fprintln(w.stderr, "fairlead: connection lost; reconnecting")
			warned = true
		}
		if err := schedule.Sleep(ctx, reconnectPause); err != nil {
			return err
		}
	}
}
