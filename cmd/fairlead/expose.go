// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

func newExpose() *cobra.Command {
	var control string
	var lasts time.Duration
	var end bool
	q := forwards.Request{Op: forwards.Expose}
	c := &cobra.Command{
		Use: "expose PORT[/tcp|/udp]", Short: "On a host, open a port to other machines for a time", GroupID: groupChange,
		Long: "On a host, open a port to other machines for a time, which ends by itself, also if the host peer\n" +
			"was restarted. Prints at which addresses.\n\n" +
			"It goes no further than --bind of `fairlead host`, which by default is the loopback: with\n" +
			"--bind asked, ports are on the loopback until they are exposed, unless the agent asks for more.",
		Example: "  fairlead expose 8080 --for 2h\n  fairlead expose 8080 --bind 192.0.2.10\n  fairlead expose 8080 --end",
		Args:    oneArg("a port such as 8080 or 53/udp"),
		RunE: func(c *cobra.Command, args []string) error {
			if lasts < time.Second || lasts > rules.MaxExposure {
				return usageError{fmt.Errorf("--for %s: want a duration such as 2h, 1s to %s", lasts, rules.MaxExposure)}
			}
			if end && (c.Flags().Changed("for") || q.Bind != "") {
				return usageError{errors.New("--end takes neither --for nor --bind")}
			}
			if q.Bind != "" {
				if _, err := rules.ParseHostAddress(q.Bind); err != nil {
					return usageError{fmt.Errorf("--bind %w", err)}
				}
			}
			if end {
				return change(c, control, forwards.Request{Op: forwards.Hide, Guest: q.Guest}, args[0])
			}
			q.Seconds = int64(lasts / time.Second)
			return expose(c, control, q, args[0])
		},
	}
	controlFlag(c, &control)
	guestFlag(c, &q.Guest)
	c.Flags().DurationVar(&lasts, "for", time.Hour, "for how long")
	c.Flags().StringVar(&q.Bind, "bind", "", "host address: all (the default) or one; never wider than the configuration allows")
	c.Flags().BoolVar(&end, "end", false, "end it now")
	completeWords(c, map[string][]string{"bind": {"all"}, "for": {"15m", "1h", "2h", "8h"}})
	return c
}

// expose sends the request, and prints what is open then.
func expose(c *cobra.Command, control string, q forwards.Request, at string) error {
	if err := selectPort(&q, at); err != nil {
		return usageError{err}
	}
	slot := port.Slot{Protocol: q.Protocol, Port: q.Port}
	v, err := client(control).ChangeForwards(c.Context(), q)
	if err != nil {
		return err
	}
	return writeExposed(c.OutOrStdout(), painter(c.OutOrStdout()), slot.String(), q.Undo().Command(), v)
}

// showsFirewall is the command that shows the rules of a system's firewall, where that is not nft.
var showsFirewall = map[string]string{
	"windows": "Get-NetFirewallRule -DisplayName *fairlead*",
	"darwin":  "/usr/libexec/ApplicationFirewall/socketfilterfw --listapps",
}

func writeExposed(w io.Writer, paint status.Painter, at, end string, v status.ForwardChange) error {
	i := slices.IndexFunc(v.Requests, func(r status.Requested) bool { return slices.Contains(v.Added, r.Request) })
	if i < 0 {
		return errors.New("it was undone again meanwhile: try again")
	}
	r := v.Requests[i]
	const form = "2006-01-02 15:04:05 UTC"
	until := r.Until.Format(form)
	openUntil := until
	if !v.Until.IsZero() { // another rule may expose it for longer
		openUntil = v.Until.UTC().Format(form)
	}
	var lines []string
	reached := func(line string, list []netip.AddrPort) {
		lines = append(lines, paint.Paint(status.Red, line))
		for _, a := range list {
			lines = append(lines, "  "+a.String())
		}
	}
	if len(v.Always) > 0 {
		reached(at+" is open to other machines without an end, by the configuration or because the agent asks for it:", v.Always)
	}
	switch {
	case len(v.Open) > 0:
		reached(fmt.Sprintf("%s is open to other machines until %s:", at, openUntil), v.Open)
	case len(v.Always) == 0:
		why := cmp.Or(r.Reason, "a rule of the configuration, or --bind, keeps it on the loopback")
		if r.Note != "" {
			why += "; " + r.Note
		}
		lines = append(lines, fmt.Sprintf("%s is not open to other machines: %s. If that changes, it is, until %s.", at, status.Quote(why), until))
	}
	if len(v.Open)+len(v.Always) > 0 {
		if r.Note != "" {
			lines = append(lines, status.Quote(r.Note))
		}
		look := cmp.Or(showsFirewall[runtime.GOOS], "sudo nft list ruleset")
		lines = append(lines, fmt.Sprintf("A firewall of this system may still refuse others: `%s` shows its rules.", look))
	}
	lines = append(lines, fmt.Sprintf("`%s` undoes this.", end))
	_, err := fmt.Fprintln(w, strings.Join(lines, "\n"))
	return err
}
