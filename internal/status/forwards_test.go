// SPDX-License-Identifier: Apache-2.0

package status

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/rules"
)

// A rule has the best state of the ports that it names, and says if there are none.
func TestDescribeRule(t *testing.T) {
	at := netip.MustParseAddrPort("127.0.0.1:18080")
	ports := []Publication{
		{Protocol: port.TCP, Port: 8080, Guest: "dev", State: port.Conflict, Reason: "taken"},
		{Protocol: port.TCP, Port: 8080, Guest: "dev", State: port.Active, HostAddresses: []netip.AddrPort{at}},
		{Protocol: port.TCP, Port: 8080, Guest: "build", State: port.Conflict, Reason: "taken"},
		{Protocol: port.TCP, Port: 9090, Guest: "dev", State: port.Denied, Reason: "denied by rule 1", Unpublished: true},
		{Protocol: port.TCP, Port: 7070, Guest: "dev", State: port.Active, Lost: true},
	}
	for _, c := range []struct {
		yaml, state, reason string
		addresses           int
	}{
		{"match: {ports: 8080}, action: allow", "active", "", 1},
		{"match: {ports: 8080, guest: build}, action: allow", "conflict", "taken", 0},
		{"match: {ports: 8080, protocol: udp}, action: allow", "pending", notServed, 0},
		{"match: {ports: 9090}, action: allow", "denied", "denied by rule 1", 0},
		{"match: {ports: 7070}, action: allow", "lost", "", 0},
		{"match: {ports: 8080}, action: deny", "denied", "", 0},
		{"match: {owner: container}, action: allow", "", "", 0},
	} {
		file, err := rules.Parse("rules", []byte("rules: [{"+c.yaml+"}]"))
		if err != nil {
			t.Fatal(err)
		}
		if f := describeRule(file.Rules[0], slices.Clone(ports)); f.State != c.state || f.Reason != c.reason || len(f.HostAddresses) != c.addresses {
			t.Errorf("%s: %+v", c.yaml, f)
		}
	}
}
