// SPDX-License-Identifier: Apache-2.0

package explain

import "testing"

func TestNamesPort(t *testing.T) {
	for _, tt := range []struct {
		rule string
		port uint16
		want bool
	}{
		{"meta mark 0x7 meta l4proto tcp th dport 5555 dnat to 10.9.0.2:80", 5555, true},
		{"meta mark 0x7 meta l4proto tcp th dport 5555 dnat to 10.9.0.2:80", 80, false},
		{"meta l4proto tcp th dport >= 8000 th dport <= 8015 dnat to 10.9.0.2:80", 8010, true},
		{"meta l4proto tcp th dport >= 8000 th dport <= 8015 dnat to 10.9.0.2:80", 8016, false},
		{"-p tcp -m multiport --dports 81,90:99,443 -j DNAT --to-destination 10.9.0.2", 95, true},
		{"-p tcp -m multiport --dports 81,90:99,443 -j DNAT --to-destination 10.9.0.2", 443, true},
		{"-p tcp -m multiport --dports 81,90:99,443 -j DNAT --to-destination 10.9.0.2", 9, false},
		{"meta l4proto tcp th dport @__set0 dnat to 10.9.0.2:80", 80, false},
		{"th sport 80 dnat to 10.9.0.2", 80, false},
	} {
		if got, _ := namesPort(tt.rule, tt.port); got != tt.want {
			t.Errorf("%d in %q: %v", tt.port, tt.rule, got)
		}
	}
	for rule, want := range map[string]bool{
		"meta l4proto tcp th dport @__set0 dnat to 10.9.0.2:80": true,
		"meta mark 0x7 dnat to 10.9.0.2":                        true,
		"meta mark 0x7 th dport 81 dnat to 10.9.0.2":            false,
	} {
		if _, unsure := namesPort(rule, 80); unsure != want {
			t.Errorf("unsure about %q: %v", rule, unsure)
		}
	}
}
