// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

var address = netip.MustParseAddrPort("192.0.2.1:8080")

func TestStateByNetsh(t *testing.T) {
	const line = "----------------------------------------------------------------------"
	profile := func(title, state string) string { return "\n" + title + " \n" + line + "\n" + state + "\n" }
	public, private := profile("Public Profile Settings:", "State                                 ON"), profile("Private Profile Settings:", "State                                 OFF")
	for _, c := range []struct {
		out      string
		want     state
		profiles []string
	}{
		{public + "Ok.\n\n", on, []string{"Public"}},
		{private + "Ok.\n\n", off, nil},
		{private + public + "Ok.\n\n", on, []string{"Public"}},
		{profile("Öffentliches Profil-Einstellungen:", "Status                                EIN") + "OK.\n", unknownState, nil},
		{"The service has not been started.\n", unknownState, nil},
		{public + "\nX\n" + line, unknownState, nil},
		{"", unknownState, nil},
	} {
		if got, profiles := netshState(strings.ReplaceAll(c.out, "\n", "\r\n")); got != c.want || !slices.Equal(profiles, c.profiles) {
			t.Errorf("%q: %d of %q, want %d of %q", c.out, got, profiles, c.want, c.profiles)
		}
	}
}

func TestStateBySocketfilterfw(t *testing.T) {
	for out, want := range map[string]state{
		"Firewall is disabled. (State = 0) \n": off,
		"Firewall is enabled. (State = 1) \n":  on,
		"Firewall is enabled. (State = 2) \n":  blocksAll,
		"no such option":                       unknownState, "": unknownState,
	} {
		if got := filterState(out); got != want {
			t.Errorf("%q: %d, want %d", out, got, want)
		}
	}
}

// What is said of a port follows from the state.
func TestReportsByState(t *testing.T) {
	for _, c := range []struct {
		f             Firewall
		text, command string
		refuses       bool
	}{
		{windowsFirewall(on, []string{"Public"}), "Windows Defender Firewall is on (Public)", "netsh advfirewall firewall add rule", false},
		{windowsFirewall(off, nil), "Windows Defender Firewall is off", "", false},
		{windowsFirewall(unknownState, nil), "may be on", "netsh advfirewall firewall add rule", false},
		{macFirewall(on), "application firewall of macOS is on", "--unblockapp", false},
		{macFirewall(blocksAll), "blocks all", "--setblockall off", true},
		{macFirewall(off), "is off", "", false},
		{macFirewall(unknownState), "if it is on", "--unblockapp", false},
	} {
		r := c.f.Check(port.TCP, address, 0)
		if !strings.Contains(r.Text, c.text) || !strings.Contains(c.f.String(), c.text) || !strings.Contains(r.Command, c.command) ||
			(r.Command == "") != (c.command == "") || r.Refuses != c.refuses {
			t.Errorf("%+v of %s, want %+v", r, c.f, c)
		}
	}
}
