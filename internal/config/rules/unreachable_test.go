// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"testing"
)

func TestUnreachable(t *testing.T) {
	for _, tt := range []struct {
		first, second string // the matches and actions of two rules
		want          bool
	}{
		{"action: deny", "{action: allow, match: {ports: 80}}", true},
		{"action: allow", "{action: deny, match: {ports: 80}}", false}, // a withheld port 80 gets to the second
		{"{action: allow, match: {ports: 1-65535}}", "{action: deny, match: {ports: 80}}", true},
		{"{action: deny, match: {ports: 80}}", "{action: allow, match: {ports: [80, 81]}}", false},
		{"{action: deny, match: {ports: [70-90, 100]}}", "{action: allow, match: {ports: [80, 100]}}", true},
		{"{action: deny, match: {ports: 80}}", "action: allow", false},
		{"{action: deny, match: {protocol: udp}}", "{action: allow, match: {protocol: udp, ports: 53}}", true},
		{"{action: deny, match: {protocol: udp}}", "{action: allow, match: {ports: 53}}", false},
		{"{action: deny, match: {address: 10.0.0.0/8}}", "{action: allow, match: {address: 10.1.0.0/16}}", true},
		{"{action: deny, match: {address: 10.1.0.0/16}}", "{action: allow, match: {address: 10.0.0.0/8}}", false},
		{"{action: deny, match: {address: loopback}}", "{action: allow, match: {address: [127.0.0.2, '::1']}}", true},
		{"{action: deny, match: {address: loopback}}", "{action: allow, match: {address: wildcard}}", false},
		{"{action: deny, match: {address: 0.0.0.0/0}}", "{action: allow, match: {address: wildcard}}", false},
		{"{action: deny, match: {source: [nat, socket]}}", "{action: allow, match: {source: nat}}", true},
		{"{action: deny, match: {owner: container}}", "{action: allow, match: {owner: [container, process]}}", false},
		{"{action: deny, match: {name: web}}", "{action: allow, match: {name: web, ports: 1}}", true},
		{"{action: deny, match: {name: 'w*'}}", "{action: allow, match: {name: web}}", false}, // globs are not compared
		{"{action: deny, match: {labels: {a: b}}}", "{action: allow, match: {labels: {a: b, c: d}}}", true},
		{"{action: deny, match: {labels: {a: b, c: d}}}", "{action: allow, match: {labels: {a: b}}}", false},
	} {
		f, err := Parse("r", fmt.Appendf(nil, "rules:\n- %s\n- %s\n", tt.first, tt.second))
		if err != nil {
			t.Fatal(err)
		}
		s, err := New(Loopback(), f.Rules)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Unreachable(); len(got) == 1 != tt.want {
			t.Errorf("%s, %s: %q, want %v", tt.first, tt.second, got, tt.want)
		}
	}
}

// A denial of one wildcard alone leaves a server of both families open at the other.
func TestDenialOfOneFamily(t *testing.T) {
	for list, want := range map[string]string{
		"{action: deny, match: {address: 0.0.0.0}}":           "rule 1 denies 0.0.0.0 alone: a server of both families stays open at [::]",
		"{action: deny, match: {address: '::/0', ports: 80}}": "rule 1 denies [::] alone: a server of both families stays open at 0.0.0.0",
		"{action: deny, match: {address: wildcard}}":          "",
		"{action: deny, match: {address: [0.0.0.0, '::']}}":   "",
		"{action: deny, match: {address: 10.0.0.0/8}}":        "",
		"{action: deny, match: {ports: 80}}":                  "",
		"{action: allow, match: {address: 0.0.0.0}}":          "",
		"{action: deny, match: {address: 0.0.0.0, ports: 80}}\n- {action: deny, match: {address: wildcard, ports: 70-90}}":          "",
		"{action: deny, match: {address: 0.0.0.0, ports: 80}}\n- {action: deny, match: {address: '::', ports: 80, owner: process}}": "rule 1 denies 0.0.0.0 alone: a server of both families stays open at [::]",
	} {
		f, err := Parse("r", []byte("rules:\n- "+list+"\n"))
		if err != nil {
			t.Fatal(err)
		}
		s, err := New(Loopback(), f.Rules)
		if err != nil {
			t.Fatal(err)
		}
		got := s.OneFamily()
		if len(got) == 0 && want != "" || len(got) > 0 && got[0] != want {
			t.Errorf("%s: %q, want %q", list, got, want)
		}
	}
}
