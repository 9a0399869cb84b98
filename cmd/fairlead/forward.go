// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

func newForward() *cobra.Command {
	root := &cobra.Command{Use: "forward", Short: "Forward ports while fairlead runs", Args: noArgs, GroupID: groupChange,
		Long: "Forward ports while fairlead runs, in the guest or on the host.\n\n" +
			"What is requested is kept in a file of its own (--forwards-file), which survives restarts. It is\n" +
			"evaluated after the rules of the configuration: it never allows what a rule there denies, and opens\n" +
			"no address that is not open without it.",
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	root.AddCommand(newForwardAdd(), newForwardLs(),
		newChange(forwards.Remove, "rm [NAME:]PORT[/tcp|/udp]", "Undo all that was added for a port", "  fairlead forward rm 8080\n  fairlead forward rm web:80"))
	return root
}

func newDeny() *cobra.Command {
	return newSelect(forwards.Deny, "deny", "Close a port, the ports of an owner, or all, until allowed again; their connections are reset",
		"  fairlead deny 9229\n  fairlead deny web:80\n  fairlead deny --owner 'web-*'\n  fairlead deny --all")
}

func newAllow() *cobra.Command {
	return newSelect(forwards.Allow, "allow", "Undo deny, with the same argument or flag, or publish a port that is denied by default",
		"  fairlead allow 9229\n  fairlead allow 5353/udp\n  fairlead allow --owner 'web-*'")
}

func guestFlag(c *cobra.Command, guest *string) {
	c.Flags().StringVar(guest, "guest", "", "on a host: only of this guest")
}

func newForwardAdd() *cobra.Command {
	var control, bind string
	q := forwards.Request{Op: forwards.Forward}
	c := &cobra.Command{
		Use: "add [NAME:|HOST:]PORT[/tcp|/udp]", Short: "Forward a port of the guest, or one that a container or Service has not published",
		Long: "Forward a port of the guest, at another host port or address if wanted: 8080:80 is `80 --to 8080`.\n" +
			"With a NAME it is a port of a container or of a Service of Kubernetes, published or not, which is\n" +
			"reached at its own address:\n\n" +
			"  CONTAINER:PORT             a container, by its name\n" +
			"  PROJECT/SERVICE:PORT       a service of Compose with one container\n" +
			"  NAMESPACE/POD:PORT         a pod, or a container in a namespace of containerd\n" +
			"  svc/NAMESPACE/NAME:PORT    a Service, by its own port\n\n" +
			"Neither the port nor the container need exist: the forward is pending until something serves it. What is not\n" +
			"published is asked for in the guest alone; on a host a NAME is of what the guest publishes by it.",
		Example: "  fairlead forward add 8080 --to 18080\n  fairlead forward add 18080:8080\n  fairlead forward add 8125/udp --to 18125 --guest dev\n" +
			"  fairlead forward add web:80 --to 8080\n  fairlead forward add svc/default/web:80",
		Args: oneArg("a port such as 8080 or 53/udp, or a name and a port such as web:80"),
		RunE: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("to") && q.To == 0 {
				return usageError{errors.New("--to 0: want a port from 1 to 65535")}
			}
			if bind != "" {
				if _, err := rules.ParseHostAddress(bind); err != nil {
					return usageError{fmt.Errorf("--bind %w", err)}
				}
			}
			if q.OnConflict != "" {
				if _, err := rules.ParseOnConflict(q.OnConflict); err != nil {
					return usageError{fmt.Errorf("--on-conflict %w", err)}
				}
			}
			q.Bind = bind
			return change(c, control, q, args[0])
		},
	}
	controlFlag(c, &control)
	guestFlag(c, &q.Guest)
	c.Flags().Uint16Var(&q.To, "to", 0, "host port (default: that of the guest, container or Service)")
	c.Flags().StringVar(&q.OnConflict, "on-conflict", "", "on a host, where the host port is in use: wait, or open the next or any free port (default wait)")
	completeWords(c, map[string][]string{"on-conflict": {"wait", "next", "any"}})
	c.Flags().StringVar(&bind, "bind", "", "host address: loopback, all, or an address; never wider than the configuration allows")
	return c
}

// newChange returns a command about one port.
func newChange(op forwards.Op, use, short, example string) *cobra.Command {
	var control string
	q := forwards.Request{Op: op}
	c := &cobra.Command{Use: use, Short: short, Example: example, Args: oneArg("a port such as 8080 or 53/udp"),
		RunE: func(c *cobra.Command, args []string) error { return change(c, control, q, args[0]) }}
	controlFlag(c, &control)
	guestFlag(c, &q.Guest)
	return c
}

// newSelect returns a command about a port, an owner or all.
func newSelect(op forwards.Op, name, short, example string) *cobra.Command {
	var control string
	q := forwards.Request{Op: op}
	c := &cobra.Command{Use: name + " [[NAME:]PORT[/tcp|/udp]]", Short: short, Example: example, Args: cobra.ArbitraryArgs, GroupID: groupChange,
		RunE: func(c *cobra.Command, args []string) error {
			selected := len(args)
			for _, is := range []bool{q.Owner != "", q.All} {
				if is {
					selected++
				}
			}
			if selected != 1 {
				return usageError{fmt.Errorf("%s: want a port, --owner NAME or --all (see `%s --help`)", nameOf(c), c.CommandPath())}
			}
			return change(c, control, q, strings.Join(args, ""))
		}}
	controlFlag(c, &control)
	guestFlag(c, &q.Guest)
	c.Flags().StringVar(&q.Owner, "owner", "", "the ports of owners with this `NAME`, in which * stands for any text")
	c.Flags().BoolVar(&q.All, "all", false, "all ports")
	return c
}

// change sends a request about a port, if one is given, and prints what it did.
func change(c *cobra.Command, control string, q forwards.Request, at string) error {
	if err := selectPort(&q, at); err != nil {
		return usageError{err}
	}
	v, err := client(control).ChangeForwards(c.Context(), q)
	if err != nil {
		return err
	}
	if v.Closed != "" && len(v.Added)+len(v.Removed) == 0 {
		return fmt.Errorf("nothing to change: %s", status.Quote(v.Closed))
	}
	return writeChange(c.OutOrStdout(), v)
}

// selectPort has a request select what an argument names, "8080", "53/udp", "18080:8080" or
// "web:80", if one is given.
func selectPort(q *forwards.Request, at string) error {
	if m, ok := parseMapping(at); ok {
		return m.selectPort(q, at)
	}
	if strings.Contains(at, ":") {
		d, err := port.ParseDemand(at)
		if err != nil {
			return err
		}
		q.Demand = d.String()
	} else if at != "" {
		slot, err := parseSlot(at)
		if err != nil {
			return err
		}
		q.Protocol, q.Port = slot.Protocol, slot.Port
	}
	return q.Check()
}

// mapping is what docker, kubectl and ssh take: [ADDRESS:][HOST PORT:]GUEST PORT.
type mapping struct {
	address string
	host    uint16 // 0 if none is given
	guest   port.Slot
}

// parseMapping reads a mapping that is more than a port.
func parseMapping(s string) (m mapping, ok bool) {
	i := strings.LastIndex(s, ":")
	guest, err := parseSlot(s[i+1:])
	if i < 0 || err != nil {
		return m, false
	}
	m.guest, m.address = guest, s[:i]
	i = strings.LastIndex(m.address, ":")
	if host, err := strconv.ParseUint(m.address[i+1:], 10, 16); err == nil && host != 0 {
		m.host, m.address = uint16(host), m.address[:max(i, 0)]
	}
	return m, m.address == "" && m.host != 0 || port.IsAddress(m.address)
}

// selectPort has a request select the mapping. Only a forward has a host port, and none has an
// address beside --bind.
func (m mapping) selectPort(q *forwards.Request, at string) error {
	given := q.To
	q.Protocol, q.Port = m.guest.Protocol, m.guest.Port
	switch {
	case q.Op != forwards.Forward && m.host != 0:
		return fmt.Errorf("%q: want the guest's port: `%s`", at, q.Command())
	case given != 0 && m.host != 0 && given != m.host:
		return fmt.Errorf("%q: --to %d is another host port", at, given)
	}
	q.To = cmp.Or(m.host, given)
	if m.address == "" {
		return q.Check()
	}
	if m.host != 0 && !strings.EqualFold(m.address, "localhost") { // which is the default
		q.Bind = cmp.Or(q.Bind, strings.Trim(m.address, "[]"))
	}
	return fmt.Errorf("%q: want `%s`", at, q.Command())
}

func writeChange(w io.Writer, v status.ForwardChange) error {
	var lines []string
	for _, q := range v.Removed {
		lines = append(lines, "Removed: "+status.Quote(q.String()))
	}
	for _, q := range v.Added {
		line := "Added: " + status.Quote(q.String())
		for _, r := range v.Requests {
			if r.Request == q {
				line += inParentheses(r)
			}
		}
		lines = append(lines, line)
	}
	if len(lines) == 0 {
		lines = append(lines, "Nothing to change.")
	}
	if v.Closed != "" {
		lines = append(lines, "Still closed: "+status.Quote(v.Closed))
	}
	_, err := fmt.Fprintln(w, strings.Join(lines, "\n"))
	return err
}

// inParentheses says of a request that was added its state, unless it has the effect that is asked
// for, and what is not as asked for.
func inParentheses(r status.Requested) string {
	var list []string
	switch {
	case r.Request.Op == forwards.Deny:
		list = append(list, r.Reason)
	case r.Request.Op == forwards.Expose || r.State == "" || r.State == port.Active.String():
	case r.Code.NamesRule(): // "denied by rule 1"
		list = append(list, r.Reason)
	default:
		list = append(list, r.State+": "+cmp.Or(r.Reason, "it is being opened"))
	}
	list = slices.DeleteFunc(append(list, r.Note), func(s string) bool { return s == "" })
	if len(list) == 0 {
		return ""
	}
	return " (" + status.Quote(strings.Join(list, "; ")) + ")"
}

func newForwardLs() *cobra.Command {
	var control string
	var out output
	c := &cobra.Command{
		Use: "ls", Short: "List what was added, in the order in which it is evaluated", Args: noArgs,
		Example: "  fairlead forward ls\n  fairlead forward ls -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			v, err := client(control).Forwards(c.Context())
			if err != nil {
				return err
			}
			if out.format == "json" {
				return newEncoder(c.OutOrStdout()).Encode(versioned(v))
			}
			return writeForwards(c.OutOrStdout(), v)
		},
	}
	controlFlag(c, &control)
	out.register(c, "table", "json")
	return c
}

func writeForwards(w io.Writer, v status.Forwards) error {
	if len(v.Requests) == 0 {
		_, err := fmt.Fprintln(w, "Nothing was added.")
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	_, _ = fmt.Fprintln(tw, "REQUEST\tHOST PORT\tSTATE\tAT\tREASON")
	for _, r := range v.Requests {
		var at []string
		for _, a := range r.HostAddresses {
			at = append(at, a.String())
		}
		hostPort := "-"
		switch q := r.Request; {
		case q.To != 0:
			hostPort = strconv.Itoa(int(q.To))
		case q.Op == forwards.Forward || q.Op == forwards.Allow:
			hostPort = "same"
		}
		if !r.Until.IsZero() && r.State != port.Active.String() {
			r.Reason = strings.TrimPrefix(r.Reason+"; ends at "+r.Until.Format("2006-01-02 15:04:05 UTC"), "; ")
		}
		r.Reason = strings.TrimSuffix(strings.TrimPrefix(r.Reason+"; "+r.Note, "; "), "; ")
		_, _ = fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\n", status.Quote(r.Request.String()), hostPort,
			cmp.Or(r.State, "-"), cmp.Or(strings.Join(at, ", "), "-"), status.Quote(cmp.Or(r.Reason, "-")))
	}
	return tw.Flush()
}
