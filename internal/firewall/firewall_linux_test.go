// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"cmp"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// iptables is named for its own chains only: a table of nftables may have one of that name.
func TestCommandThatAllows(t *testing.T) {
	for by, want := range map[string]string{
		"chain ip filter INPUT":   "sudo iptables -I INPUT -p tcp --dport 8080 -j ACCEPT",
		"chain ip6 filter INPUT":  "sudo ip6tables -I INPUT -p tcp --dport 8080 -j ACCEPT",
		"chain inet filter INPUT": "sudo nft insert rule inet filter INPUT tcp dport 8080 accept",
		"":                        "sudo nft list ruleset",
	} {
		if got := allow(port.Slot{Protocol: port.TCP, Port: 8080}, time.Hour, noManager, by); got != want {
			t.Errorf("%q: %s, want %s", by, got, want)
		}
	}
}

// What an ordinary user may not read is said with the command that shows it to root.
func TestRulesThatCannotBeRead(t *testing.T) {
	at := netip.MustParseAddrPort("192.0.2.1:8080")
	for _, c := range []struct {
		m                   manager
		described, command  string
		permanent, temporal string
	}{
		{noManager, "can be read by root only: `sudo nft list ruleset`", "sudo nft list ruleset", "", ""},
		{firewalld, "firewalld manages it", "", "sudo firewall-cmd --permanent --add-port=8080/tcp && sudo firewall-cmd --reload", "sudo firewall-cmd --add-port=8080/tcp --timeout=3600"},
		{ufw, "ufw manages it", "sudo ufw allow 8080/tcp", "", ""},
	} {
		f := system(nil, os.ErrPermission, c.m)
		if !strings.Contains(f.String(), c.described) {
			t.Errorf("%s, want %q", f, c.described)
		}
		for lasts, want := range map[time.Duration]string{0: cmp.Or(c.permanent, c.command), time.Hour: cmp.Or(c.temporal, c.command)} {
			if r := f.Check(port.TCP, at, lasts); r.Command != want || r.Refuses || !strings.Contains(r.Text, "by root only") {
				t.Errorf("%+v, want %q", r, want)
			}
		}
	}
}
