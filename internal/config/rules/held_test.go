// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// Rules take a container that a user's own engine names for the process that holds its port.
// Only rules that deny and name an owner see the container as well.
func TestContainersOfUsersEngines(t *testing.T) {
	web := port.Owner{
		Kind: port.OwnerContainer, Name: "web", ID: "w", Labels: map[string]string{LabelExpose: "all", LabelHostPort: "22", "a": "b"},
		Held: &port.Held{Engine: "docker", User: "alice", Process: "rootlesskit"},
	}
	p := port.Publication{
		Fact:    port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8080}, Owner: web},
		Origins: []port.OriginInfo{{Origin: port.Origin{Source: port.SourceSocket}}},
	}
	deny := Rule{Deny: true}
	wide := func(m Match) Rule { return Rule{Match: m, HostAddress: All()} }
	no := func(m Match) Rule { return Rule{Match: m, Deny: true} }
	container, process := []port.OwnerKind{port.OwnerContainer}, []port.OwnerKind{port.OwnerProcess}
	for _, c := range []struct {
		name  string
		rules []Rule
		allow bool
		rule  string
		wide  bool
	}{
		{"none", nil, true, defaultAllow.String(), false},
		{"allow by name", []Rule{wide(Match{Name: "web"})}, true, defaultAllow.String(), false},
		{"allow by kind", []Rule{wide(Match{Owners: container})}, true, defaultAllow.String(), false},
		{"allow by label", []Rule{wide(Match{Labels: map[string]string{"a": "b"}})}, true, defaultAllow.String(), false},
		{"allow by port", []Rule{wide(Match{Ports: []PortRange{{8080, 8080}}})}, true, "rule 1", true},
		{"allow its process", []Rule{wide(Match{Owners: process, Name: "rootlesskit"})}, true, "rule 1", true},
		{"only containers", []Rule{wide(Match{Owners: container}), deny}, false, "rule 2", false},
		{"only processes", []Rule{wide(Match{Owners: process}), deny}, true, "rule 1", true},
		{"deny by name", []Rule{no(Match{Name: "web"})}, false, "rule 1", false},
		{"deny by kind", []Rule{no(Match{Owners: container})}, false, "rule 1", false},
		{"deny its process", []Rule{no(Match{Name: "rootlesskit"})}, false, "rule 1", false},
		{"deny processes", []Rule{no(Match{Owners: process})}, false, "rule 1", false},
		{"deny another", []Rule{no(Match{Name: "db"})}, true, defaultAllow.String(), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := New(Loopback(), c.rules)
			if err != nil {
				t.Fatal(err)
			}
			s = s.WithLabels(true)
			d := s.Decide(p)
			if d.Allow != c.allow || d.Rule.String() != c.rule || d.Allow && d.Host[0].Addr().IsUnspecified() != c.wide || d.Allow && d.Host[0].Port() != 8080 {
				t.Errorf("Decide = %+v", d)
			}
			decides := 0
			for _, step := range s.Explain(p) {
				if step.Decides {
					decides++
					if step.Rule != c.rule {
						t.Errorf("%+v decides, want %s", step, c.rule)
					}
				}
			}
			if decides != 1 {
				t.Errorf("%d steps decide: %+v", decides, s.Explain(p))
			}
			if title, denied, ok := s.First(p); ok && (denied == c.allow || title != c.rule) {
				t.Errorf("First = %q, %v", title, denied)
			}
			h := s.Host("vm", p, []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080")})
			if h.Allow != c.allow || h.Allow && h.Host[0].Addr().IsUnspecified() != c.wide {
				t.Errorf("Host = %+v", h)
			}
			if p.Owner.Held == nil || len(p.Owner.Labels) != 3 {
				t.Error("the publication was changed")
			}
		})
	}
}
