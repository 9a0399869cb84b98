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
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// rulesQuery is what the flags of `fairlead explain --rules` say about a port.
type rulesQuery struct {
	enabled                            bool
	file, address, source, kind, guest string
	owner                              port.Owner
}

func (q *rulesQuery) register(c *cobra.Command) {
	f := c.Flags()
	f.BoolVar(&q.enabled, "rules", false, "print only which rule decides about the port, which need not exist")
	f.StringVar(&q.file, "config", "", "with --rules, those of this file instead of those of the running agent or host")
	f.StringVar(&q.guest, "guest", "", "with --rules, on a host: the guest that has the port")
	f.StringVar(&q.address, "address", "0.0.0.0", "with --rules, guest address of the port; with a NAME "+exampleAddress+" stands for the container's")
	f.StringVar(&q.source, "source", "socket", "with --rules, source that reports it: "+strings.Join(rules.Sources(), ", "))
	f.StringVar(&q.kind, "owner", "process", "with --rules, kind of its owner: container, service, process or unknown")
	f.StringVar(&q.owner.Name, "name", "", "with --rules, name of its owner")
	f.StringVar(&q.owner.Namespace, "namespace", "", "with --rules, namespace of its owner")
	f.StringToStringVar(&q.owner.Labels, "label", nil, "with --rules, label of its owner, `KEY=VALUE` (may be repeated)")
	f.Lookup("label").DefValue = ""
}

// validate refuses flags that need --rules, and the one that makes no sense with it.
func (q *rulesQuery) validate(c *cobra.Command) error {
	if q.enabled {
		if c.Flags().Changed("no-dial") {
			return usageError{errors.New("--no-dial: not with --rules")}
		}
		return nil
	}
	for _, flag := range []string{"config", "guest", "address", "source", "owner", "name", "namespace", "label"} {
		if c.Flags().Changed(flag) {
			return usageError{fmt.Errorf("--%s: only with --rules", flag)}
		}
	}
	return nil
}

// print prints which rule decides about a port.
func (q *rulesQuery) print(c *cobra.Command, control, at string, asJSON bool) error {
	d, slot, err := parsePort(at)
	if err != nil {
		return usageError{err}
	}
	if !d.IsZero() {
		if c.Flags().Changed("source") && q.source != port.SourceDemand {
			return usageError{fmt.Errorf("--source %s: what is asked for by name is of source %s", q.source, port.SourceDemand)}
		}
		q.source = port.SourceDemand
		defaultsByName(c, d, &q.address, &q.kind, &q.owner)
	}
	addr, err := netip.ParseAddr(q.address)
	if err != nil {
		return usageError{fmt.Errorf("--address %q: want an IP address", q.address)}
	}
	if err := q.owner.Kind.UnmarshalText([]byte(q.kind)); err != nil || q.owner.Kind.String() != q.kind {
		return usageError{fmt.Errorf("--owner %q: want container, service, process or unknown", q.kind)}
	}
	v, err := testRules(c, q.file, control, status.RuleQuery{
		Key:    port.Key{Protocol: slot.Protocol, Address: addr.Unmap(), Port: slot.Port},
		Source: q.source, Demand: d.String(), Owner: q.owner, Guest: q.guest,
	})
	if err != nil {
		return err
	}
	return writeVerdict(c.OutOrStdout(), v, asJSON)
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
	if v.Code.NamesRule() {
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
