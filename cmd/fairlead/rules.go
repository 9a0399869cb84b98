// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
	"github.com/fairlead/fairlead/internal/status"
)

func newRules() *cobra.Command {
	root := &cobra.Command{Use: "rules", Short: "Test the rules of a configuration", Args: noArgs, GroupID: groupCheck,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	root.AddCommand(newRulesTest())
	return root
}

func newRulesTest() *cobra.Command {
	var file, control, address, source, kind, guest string
	var owner port.Owner
	var out output
	c := &cobra.Command{
		Use:   "test [NAME:]PORT[/tcp|/udp]",
		Short: "Print which rule decides about a port, and how",
		Long: "Print which rule decides about a port, and how.\n\n" +
			"The rules are those that the running agent or host uses, or those of --config FILE. The\n" +
			"port need not exist. With a NAME it is one of a container or Service that is asked for by name, see\n" +
			"`fairlead forward add`. On a host the guest is taken to ask for it as an agent without rules does.",
		Example: "  fairlead rules test 9229\n  fairlead rules test 53/udp --owner container --name dns\n  fairlead rules test 8080 --guest dev\n  fairlead rules test web:80",
		Args:    oneArg("a port such as 8080 or 53/udp, or a name and a port such as web:80"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			d, slot, err := parsePort(args[0])
			if err != nil {
				return usageError{err}
			}
			if !d.IsZero() {
				if c.Flags().Changed("source") && source != port.SourceDemand {
					return usageError{fmt.Errorf("--source %s: what is asked for by name is of source %s", source, port.SourceDemand)}
				}
				source = port.SourceDemand
				defaultsByName(c, d, &address, &kind, &owner)
			}
			addr, err := netip.ParseAddr(address)
			if err != nil {
				return usageError{fmt.Errorf("--address %q: want an IP address", address)}
			}
			if err := owner.Kind.UnmarshalText([]byte(kind)); err != nil || owner.Kind.String() != kind {
				return usageError{fmt.Errorf("--owner %q: want container, service, process or unknown", kind)}
			}
			v, err := testRules(c, file, control, status.RuleQuery{
				Key:    port.Key{Protocol: slot.Protocol, Address: addr.Unmap(), Port: slot.Port},
				Source: source, Demand: d.String(), Owner: owner, Guest: guest,
			})
			if err != nil {
				return err
			}
			return writeVerdict(c.OutOrStdout(), v, out.format == "json")
		},
	}
	f := c.Flags()
	f.StringVar(&file, "config", "", "test the rules of this file instead of those of the running agent or host")
	controlFlag(c, &control)
	f.StringVar(&guest, "guest", "", "on a host: the guest that has the port")
	f.StringVar(&address, "address", "0.0.0.0", "guest address of the port; with a NAME "+exampleAddress+" stands for the container's")
	f.StringVar(&source, "source", "socket", "source that reports it: "+strings.Join(rules.Sources(), ", "))
	f.StringVar(&kind, "owner", "process", "kind of its owner: container, service, process or unknown")
	f.StringVar(&owner.Name, "name", "", "name of its owner")
	f.StringVar(&owner.Namespace, "namespace", "", "namespace of its owner")
	f.StringToStringVar(&owner.Labels, "label", nil, "label of its owner, `KEY=VALUE` (may be repeated)")
	f.Lookup("label").DefValue = ""
	out.register(c, "text", "json")
	return c
}

// exampleAddress, of RFC 5737, stands for the address of a container or Service, which is not
// known here.
const exampleAddress = "192.0.2.1"

// defaultsByName sets what flags leave open of a port that is asked for by name. Of a container
// with a scope the name is not known: the scope may be a Compose project.
func defaultsByName(c *cobra.Command, d port.Demand, address, kind *string, owner *port.Owner) {
	set := func(flag string, to *string, value string) {
		if !c.Flags().Changed(flag) {
			*to = value
		}
	}
	set("address", address, exampleAddress)
	if d.Service {
		set("owner", kind, port.OwnerService.String())
		set("namespace", &owner.Namespace, d.Scope)
		set("name", &owner.Name, d.Name)
		return
	}
	set("owner", kind, port.OwnerContainer.String())
	if d.Scope == "" {
		set("name", &owner.Name, d.Name)
	}
}

// testRules asks the running agent or host, or reads a configuration if one is given or
// neither runs.
func testRules(c *cobra.Command, file, control string, q status.RuleQuery) (status.RuleVerdict, error) {
	if file == "" {
		v, err := client(control).TestRules(c.Context(), q)
		if control != "" || !errors.Is(err, status.ErrNotRunning) {
			return v, err
		}
	}
	host := q.Guest != "" || file == "" && ofHost(runtime.GOOS, config.DefaultAgentFile, config.DefaultHostFile())
	if !host {
		cfg, err := config.LoadAgent(file, nil, os.LookupEnv)
		if err == nil {
			noteConfig(c, file, "agent", cfg.File())
			return q.Decide(cfg.Rules)
		}
		if _, other := loadRules(file, true); file == "" || other != nil && filepath.Base(file) != filepath.Base(config.DefaultHostFile()) {
			return status.RuleVerdict{}, err
		}
	}
	cfg, err := config.LoadHost(file, nil, os.LookupEnv)
	if err != nil {
		return status.RuleVerdict{}, err
	}
	noteConfig(c, file, "host", cfg.File())
	var guests []status.Peer
	for _, g := range cfg.Peers() {
		guests = append(guests, status.Peer{Guest: g.ID(), Endpoint: g.Endpoint.String()})
	}
	return q.DecideHost(cfg.Rules, guests)
}

// ofHost reports whether a machine of a system without a running fairlead is a host: it can be
// nothing else, or has a configuration of a host alone.
func ofHost(goos, agentFile, hostFile string) bool {
	has := func(path string) bool {
		_, err := os.Stat(path)
		return path != "" && err == nil
	}
	return goos != "linux" || has(hostFile) && !has(agentFile)
}

// noteConfig says whose rules are tested if nobody who runs was asked.
func noteConfig(c *cobra.Command, given, role, file string) {
	if given == "" {
		_, _ = fmt.Fprintf(c.ErrOrStderr(), "fairlead: neither agent nor host is running; these are the rules of %s (%s)\n", cmp.Or(file, "the defaults"), role)
	}
}

func writeVerdict(w io.Writer, v status.RuleVerdict, asJSON bool) error {
	if asJSON {
		return newEncoder(w).Encode(versioned(v))
	}
	if v.Guest != "" {
		v.Publication += " of guest " + status.Quote(v.Guest)
	}
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for _, s := range v.Steps {
		mark := " "
		if s.Decides {
			mark = ">"
		}
		_, _ = fmt.Fprintf(tw, "%s %s\t%s\n", mark, status.Quote(s.Rule), status.Quote(s.Why))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, text := range v.Warnings {
		if _, err := fmt.Fprintf(w, "warning: %s\n", status.Quote(text)); err != nil {
			return err
		}
	}
	answer := "denied: " + status.Quote(v.Reason)
	if strings.Contains(v.Reason, v.Rule) {
		_, err := fmt.Fprintf(w, "%s: %s\n", v.Publication, status.Quote(v.Reason))
		return err
	}
	if v.Allow {
		answer = "allowed on the host at " + strings.Join(v.Host, ", ")
	}
	_, err := fmt.Fprintf(w, "%s: %s (%s)\n", v.Publication, answer, status.Quote(v.Rule))
	return err
}

// parsePort reads "8080", "53/udp", or "web:80", of which it also returns the whole.
func parsePort(s string) (port.Demand, port.Slot, error) {
	if strings.Contains(s, ":") {
		d, err := port.ParseDemand(s)
		return d, d.Slot, err
	}
	slot, err := parseSlot(s)
	return port.Demand{}, slot, err
}

// parseSlot reads PORT, which means TCP, or PORT/PROTOCOL.
func parseSlot(s string) (port.Slot, error) {
	q, err := status.ParseQuery(s)
	slot := port.Slot{Protocol: port.TCP, Port: q.Port}
	if q.Protocol != 0 {
		slot.Protocol = q.Protocol
	}
	return slot, err
}
