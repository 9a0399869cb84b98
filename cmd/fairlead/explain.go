// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/status"
)

func newExplain() *cobra.Command {
	var control string
	var noDial bool
	var query rulesQuery
	var out output
	c := &cobra.Command{
		Use:   "explain PORT[/tcp|/udp] | --rules [NAME:]PORT[/tcp|/udp]",
		Short: "Explain why a port is, or is not, reachable on the host, and what to do next",
		Long: "Explain why a port is, or is not, reachable on the host, and what to do next.\n\n" +
			"With --rules only the rules are looked at: which one decides, and how. They are those that the running agent\n" +
			"or host uses, or those of --config FILE. The port need not exist. With a NAME it is one of a container or Service\n" +
			"that is asked for by name, see `fairlead forward add`. On a host the guest is taken to ask for it as an agent\n" +
			"without rules does.\n\n" +
			"Exit status: 0 if it is reachable, or open and not tested, 1 if not or if the agent does not answer,\n" +
			"2 usage error; with --rules 0 for any answer.",
		Example: "  fairlead explain 8080\n  fairlead explain 53/udp\n  fairlead explain --rules 9229\n  fairlead explain --rules 53/udp --owner container --name dns\n  fairlead explain 8080 && xdg-open http://localhost:8080",
		GroupID: groupInspect,
		RunE: func(c *cobra.Command, args []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if err := query.validate(c); err != nil {
				return err
			}
			if query.enabled {
				return query.print(c, control, args[0], out.format == "json")
			}
			q, err := status.ParseQuery(args[0])
			if err != nil {
				return usageError{err}
			}
			q.Dial = !noDial
			r, err := client(control).Explain(c.Context(), q)
			if err != nil {
				return err
			}
			if out.format == "json" {
				err = newEncoder(c.OutOrStdout()).Encode(versioned(r))
			} else {
				err = status.WriteReport(c.OutOrStdout(), r, status.Style{
					Width: width(c.OutOrStdout(), false), Paint: painter(c.OutOrStdout()), Now: time.Now(),
				})
			}
			if err == nil && !r.Verdict.Reachable() {
				err = errNo
			}
			return err
		},
	}
	portArg(c, &control)
	controlFlag(c, &control)
	query.register(c)
	c.Flags().BoolVar(&noDial, "no-dial", false, "do not connect to the server (TCP only)")
	out.register(c, "text", "json")
	return c
}

// completionTimeout is how long a shell waits for completions.
const completionTimeout = time.Second

// portArg makes c take one argument, a port, which is completed from those at control.
func portArg(c *cobra.Command, control *string) {
	c.Args = oneArg("a port such as 8080 or 53/udp")
	c.ValidArgsFunction = func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		return completePorts(c.Context(), *control, args)
	}
}

// completePorts completes the current ports, with their owners.
func completePorts(ctx context.Context, control string, args []string) ([]string, cobra.ShellCompDirective) {
	const directive = cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
	if len(args) > 0 {
		return nil, directive
	}
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	l, err := client(control).List(ctx)
	if err != nil {
		return nil, directive
	}
	var list []string
	for _, p := range l.Publications {
		owner := p.Owner.Name
		if owner == "" {
			owner = p.Owner.Kind.String()
		}
		text := cobra.CompletionWithDesc(p.Key.Slot().String(), status.Quote(owner)+", "+p.State.String())
		if !slices.Contains(list, text) {
			list = append(list, text)
		}
	}
	return list, directive
}
