// SPDX-License-Identifier: Apache-2.0

package firewall

import (
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
