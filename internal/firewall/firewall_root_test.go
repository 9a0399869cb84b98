// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package firewall

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// What is said about a port is what the kernel does with the rules that nft and iptables
// wrote.
func TestRulesOfTheKernel(t *testing.T) {
	for name, c := range map[string]struct {
		commands string // one a line
		want     string // text, and command of the report
	}{
		"none": {"", "no firewall rule of this system (nftables, iptables) is about incoming connections"},
		"only NAT": {"nft add table ip t\nnft add chain ip t c { type nat hook prerouting priority 0 ; }",
			"no firewall rule of this system (nftables, iptables) is about incoming connections"},
		"policy accepts": {"nft add table inet filter\nnft add chain inet filter input { type filter hook input priority 0 ; }",
			"the firewall lets them in (chain inet filter input)"},
		"policy drops": {"nft add table inet filter\nnft add chain inet filter input { type filter hook input priority 0 ; policy drop ; }\nnft add rule inet filter input ct state vmap { established : accept, related : accept, invalid : drop }\nnft add rule inet filter input iifname lo accept\nnft add rule inet filter input tcp dport { 22, 443 } accept",
			"the firewall refuses them (chain inet filter input): sudo nft insert rule inet filter input tcp dport 8080 accept"},
		"a rule accepts": {"nft add table inet filter\nnft add chain inet filter input { type filter hook input priority 0 ; policy drop ; }\nnft add rule inet filter input ct state new tcp dport { 22, 8080 } accept",
			"the firewall lets them in (chain inet filter input)"},
		"a range of ports": {"nft add table inet filter\nnft add chain inet filter input { type filter hook input priority 0 ; policy drop ; }\nnft add rule inet filter input tcp dport 8000-8999 accept",
			"the firewall lets them in (chain inet filter input)"},
		"by source": {"nft add table inet filter\nnft add chain inet filter input { type filter hook input priority 0 ; policy drop ; }\nnft add rule inet filter input ip saddr 192.0.2.0/24 accept",
			"the firewall may refuse them (chain inet filter input is not wholly understood): sudo nft list ruleset"},
		"reject in another chain": {"nft add table ip t\nnft add chain ip t in { type filter hook input priority 0 ; }\nnft add chain ip t more\nnft add rule ip t in tcp dport 8080 jump more\nnft add rule ip t more reject",
			"the firewall refuses them (chain ip t in): sudo nft insert rule ip t in tcp dport 8080 accept"},
		"a chain that returns": {"nft add table ip t\nnft add chain ip t in { type filter hook input priority 0 ; policy drop ; }\nnft add chain ip t more\nnft add rule ip t in goto more\nnft add rule ip t more return\nnft add rule ip t in accept",
			"the firewall refuses them (chain ip t in): sudo nft insert rule ip t in tcp dport 8080 accept"},
		"of the other family": {"nft add table ip6 t\nnft add chain ip6 t in { type filter hook input priority 0 ; policy drop ; }",
			"no firewall rule of this system (nftables, iptables) is about incoming connections"},
		"a limit": {"nft add table ip t\nnft add chain ip t in { type filter hook input priority 0 ; }\nnft add rule ip t in limit rate 1/second drop",
			"the firewall may refuse them (chain ip t in is not wholly understood): sudo nft list ruleset"},
		"iptables": {"iptables-nft -P INPUT DROP\niptables-nft -A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\niptables-nft -A INPUT -p tcp --dport 22 -j ACCEPT\niptables-nft -A INPUT -j REJECT",
			"the firewall refuses them (chain ip filter INPUT): sudo iptables -I INPUT -p tcp --dport 8080 -j ACCEPT"},
		"iptables accepts": {"iptables-nft -P INPUT DROP\niptables-nft -A INPUT -m conntrack --ctstate NEW -p tcp -m multiport --dports 22,8080 -m comment --comment web -j ACCEPT",
			"the firewall lets them in (chain ip filter INPUT)"},
	} {
		t.Run(name, func(t *testing.T) {
			ns, err := netns.New()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = ns.Close() }()
			var got Report
			var described string
			err = ns.Do(func() error {
				for _, line := range strings.Split(c.commands, "\n") {
					if line = strings.TrimSpace(line); line == "" {
						continue
					}
					if out, err := exec.Command(strings.Fields(line)[0], strings.Fields(line)[1:]...).CombinedOutput(); err != nil {
						return fmt.Errorf("%s: %w: %s", line, err, out)
					}
				}
				rs, err := read()
				f := system(rs, err, noManager)
				got, described = f.Check(port.TCP, netip.MustParseAddrPort("192.0.2.1:8080"), time.Hour), f.String()
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if want := map[string]string{
				"none": noRules, "policy accepts": "the firewall lets in what no rule refuses",
				"policy drops": "the firewall drops incoming connections that no rule accepts (chain inet filter input)",
				"iptables":     "the firewall drops incoming connections that no rule accepts (chain ip filter INPUT)",
			}[name]; want != "" && described != want {
				t.Errorf("described as %q, want %q", described, want)
			}
			if got.Refuses != strings.Contains(got.Text, "refuses them") {
				t.Errorf("%+v", got)
			}
			text := got.Text
			if got.Command != "" {
				text += ": " + got.Command
			}
			if text != c.want {
				t.Errorf("got  %s\nwant %s", text, c.want)
			}
		})
	}
	f := Read(t.Context())
	if r := f.Check(port.TCP, netip.MustParseAddrPort("192.0.2.1:8080"), time.Hour); r.Text == "" || f.String() == "" {
		t.Error("nothing is said about this system")
	}
}
