// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/config/trust"
	"github.com/fairlead/fairlead/internal/guest/wsl"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

func newOpen() *cobra.Command {
	var control, guest string
	var https bool
	c := &cobra.Command{
		Use: "open PORT[/tcp]", Short: "Open a port in the browser of this system", GroupID: groupInspect,
		Long: "Open a port in the browser of this system, at the host address where it is reachable, by xdg-open, open,\n" +
			"wslview in WSL, or rundll32 on Windows. Prints the URL first.",
		Example: "  fairlead open 8080\n  fairlead open 8443 --https --guest dev",
		Args:    oneArg("a port such as 8080"),
		RunE: func(c *cobra.Command, args []string) error {
			slot, err := parseSlot(args[0])
			if err != nil {
				return usageError{err}
			}
			if slot.Protocol != port.TCP {
				return usageError{fmt.Errorf("%s: a browser opens TCP ports", slot)}
			}
			l, err := client(control).Await(c.Context(), restartTimeout)
			if err != nil {
				return err
			}
			at, err := reachable(l, slot, guest)
			if err != nil {
				return err
			}
			url := pageURL(at, https || slot.Port == 443)
			if _, err := fmt.Fprintln(c.OutOrStdout(), url); err != nil {
				return err
			}
			return browse(c, url)
		},
	}
	controlFlag(c, &control)
	guestFlag(c, &guest)
	c.Flags().BoolVar(&https, "https", false, "open it as https (default for port 443)")
	return c
}

// reachable returns where a port is reachable, on the loopback if it is there.
func reachable(l status.List, slot port.Slot, guest string) (at netip.AddrPort, err error) {
	var guests []string
	var reason, hint string
	for _, p := range l.Publications {
		if guest != "" && guest != p.Guest && guest != p.GuestName {
			continue
		}
		if is := p.Key.Slot(); is != slot {
			if is.Protocol == slot.Protocol && slices.ContainsFunc(p.HostAddresses, func(a netip.AddrPort) bool { return a.Port() == slot.Port }) {
				hint = fmt.Sprintf(", and %d is the host port of guest port %s: `fairlead open %d`", slot.Port, is, is.Port)
			}
			continue
		}
		if p.Lost {
			reason = "guest " + cmp.Or(p.GuestName, p.Guest) + " is not connected, or has not reported it since it restarted"
			continue
		}
		if len(p.HostAddresses) == 0 {
			reason = cmp.Or(p.Reason, p.State.String())
			continue
		}
		best := slices.MaxFunc(p.HostAddresses, func(a, b netip.AddrPort) int { return cmp.Compare(nearness(a.Addr()), nearness(b.Addr())) })
		if !at.IsValid() || nearness(best.Addr()) > nearness(at.Addr()) {
			at = best
		}
		if !slices.Contains(guests, p.Guest) {
			guests = append(guests, p.Guest)
		}
	}
	switch {
	case reason != "":
	case guest != "" && hint == "":
		reason = fmt.Sprintf("no guest %q serves it", guest)
	default:
		reason = "nothing serves it" + hint
	}
	switch {
	case len(guests) == 0:
		return at, fmt.Errorf("%s is not reachable: %s (`fairlead explain %s` says more)", slot, status.Quote(reason), slot)
	case len(guests) > 1:
		return at, fmt.Errorf("%s is served by several guests: choose one with --guest: %s", slot, status.Quote(strings.Join(guests, ", ")))
	}
	return at, nil
}

// nearness orders addresses: the loopback and wildcards, which have it, before others; IPv4
// before IPv6.
func nearness(a netip.Addr) (n int) {
	if a.IsLoopback() || a.IsUnspecified() {
		n = 2
	}
	if a.Is4() {
		n++
	}
	return n
}

func pageURL(at netip.AddrPort, https bool) string {
	if at.Addr().IsUnspecified() {
		at = netip.AddrPortFrom(port.Loopback(at.Addr()), at.Port())
	}
	if https {
		return "https://" + at.String() + "/"
	}
	return "http://" + at.String() + "/"
}

// browsers are the commands that open a URL, in the order in which they are tried. The URL
// is the last argument; no shell reads it.
func browsers(system string, inWSL bool) [][]string {
	switch {
	case system == "windows":
		return [][]string{{"rundll32.exe", "url.dll,FileProtocolHandler"}}
	case system == "darwin":
		return [][]string{{"/usr/bin/open"}}
	case inWSL:
		return [][]string{{"wslview"}, {"xdg-open"}}
	}
	return [][]string{{"xdg-open"}}
}

// browse opens a URL and waits for the command, which may be a browser in this terminal.
func browse(c *cobra.Command, url string) error {
	var missing []string
	find := exec.LookPath
	if runtime.GOOS == "windows" {
		find = trust.Find // whatever the working directory holds
	}
	for _, argv := range browsers(runtime.GOOS, wsl.Here("/")) {
		path, err := find(argv[0])
		if err != nil {
			missing = append(missing, argv[0])
			continue
		}
		cmd := exec.CommandContext(c.Context(), path, append(argv[1:], url)...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr()
		if err := cmd.Run(); err != nil && c.Context().Err() == nil {
			return fmt.Errorf("%s: %w: open the URL yourself", argv[0], err)
		}
		return nil
	}
	return fmt.Errorf("there is no %s here: open the URL yourself", strings.Join(missing, " or "))
}
