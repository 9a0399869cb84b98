// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
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

// verdict is the answer of "rules test -o json".
type verdict struct {
	Publication string       `json:"publication"`
	Allow       bool         `json:"allow"`
	Rule        string       `json:"rule"`
	Reason      string       `json:"reason"`
	Host        []string     `json:"hostAddresses"`
	Steps       []rules.Step `json:"steps"`
}

func newRulesTest() *cobra.Command {
	var file, address, source, kind string
	var owner port.Owner
	var out output
	c := &cobra.Command{
		Use:     "test PORT[/tcp|/udp]",
		Short:   "Print which rule decides about a port, and how",
		Example: "  fairlead rules test 9229\n  fairlead rules test 53/udp --owner container --name dns",
		Args:    oneArg("a port such as 8080 or 53/udp"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			slot, err := parseSlot(args[0])
			if err != nil {
				return usageError{err}
			}
			addr, err := netip.ParseAddr(address)
			if err != nil {
				return usageError{fmt.Errorf("--address %q: want an IP address", address)}
			}
			if err := owner.Kind.UnmarshalText([]byte(kind)); err != nil || owner.Kind.String() != kind {
				return usageError{fmt.Errorf("--owner %q: want container, service, process or unknown", kind)}
			}
			cfg, err := config.LoadAgent(file, nil, os.LookupEnv)
			if err != nil {
				return err
			}
			p := port.Publication{
				Key:     port.Key{Protocol: slot.Protocol, Address: addr.Unmap(), Port: slot.Port},
				Owner:   owner,
				Origins: []port.OriginInfo{{Origin: port.Origin{Source: source}}},
			}
			return writeVerdict(c.OutOrStdout(), cfg.Rules, p, out.format == "json")
		},
	}
	f := c.Flags()
	f.StringVar(&file, "config", "", "configuration file of the agent (default "+config.DefaultAgentFile+")")
	f.StringVar(&address, "address", "0.0.0.0", "guest address of the port")
	f.StringVar(&source, "source", "socket", "source that reports it: "+strings.Join(rules.Sources(), ", "))
	f.StringVar(&kind, "owner", "process", "kind of its owner: container, service, process or unknown")
	f.StringVar(&owner.Name, "name", "", "name of its owner")
	f.StringVar(&owner.Namespace, "namespace", "", "namespace of its owner")
	f.StringToStringVar(&owner.Labels, "label", nil, "label of its owner, `KEY=VALUE` (may be repeated)")
	f.Lookup("label").DefValue = ""
	out.register(c, "text", "json")
	return c
}

func writeVerdict(w io.Writer, set *rules.Set, p port.Publication, asJSON bool) error {
	d, steps := set.Decide(p), set.Explain(p)
	v := verdict{Publication: p.String(), Allow: d.Allow, Rule: d.Rule, Reason: d.Reason, Host: []string{}, Steps: steps}
	for _, a := range d.Host {
		v.Host = append(v.Host, a.String())
	}
	if asJSON {
		return json.NewEncoder(w).Encode(versioned(v))
	}
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for _, s := range steps {
		mark := " "
		if s.Decides {
			mark = ">"
		}
		_, _ = fmt.Fprintf(tw, "%s %s\t%s\n", mark, s.Rule, status.Quote(s.Why))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	answer := "denied: " + status.Quote(d.Reason)
	if strings.Contains(d.Reason, d.Rule) {
		_, err := fmt.Fprintf(w, "%s: %s\n", v.Publication, status.Quote(d.Reason))
		return err
	}
	if d.Allow {
		answer = "allowed on the host at " + strings.Join(v.Host, ", ")
	}
	_, err := fmt.Fprintf(w, "%s: %s (%s)\n", v.Publication, answer, status.Quote(d.Rule))
	return err
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
