// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

const forwardsFile = "/var/lib/fairlead/forwards.json"

// demanded makes it a port that was asked for by name.
func demanded(names ...string) func(*Publication) {
	return func(p *Publication) {
		for _, d := range names {
			p.SetNamed("", append(p.Demands(), d))
		}
	}
}

func ofGuest(id string) func(*Publication) { return func(p *Publication) { p.Guest = id } }

// Each remedy is right for what holds the address, for what decides about the port, and for
// where the command runs. That commands are accepted and have their effect is tested with the
// command line.
func TestRemedies(t *testing.T) {
	lost := outcome(port.Conflict, "127.0.0.1:8080", inUse("127.0.0.1:8080"))
	two := []Source{{Name: "a", State: "live"}, {Name: "b", State: "live"}}
	for _, tt := range []struct {
		name string
		f    Facts
		want string
	}{
		{"a port near the end", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:60000", outcome(port.Conflict, "127.0.0.1:60000", port.Because(port.InUse, "127.0.0.1:60000")))}},
			"stop the program that uses 127.0.0.1:60000 on the host (fairlead takes the port over within seconds), or give this port another one: `fairlead forward add 60000/tcp --to 50000`"},
		{"the next number is taken", Facts{HostPorts: []port.Slot{{Protocol: port.TCP, Port: 18080}, {Protocol: port.UDP, Port: 28080}}, Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", lost)}},
			"stop the program that uses 127.0.0.1:8080 on the host (fairlead takes the port over within seconds), or give this port another one: `fairlead forward add 8080/tcp --to 28080`"},
		{"another guest has it", Facts{Host: true, Sources: two, Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", ofGuest("a"), outcome(port.Conflict, "127.0.0.1:8080", port.Because(port.HeldByRival, "127.0.0.1:8080", `tcp 0.0.0.0:8080 of guest "b" ("node")`)))}},
			"stop what has it, or give this port another one: `fairlead forward add 8080/tcp --to 18080 --guest a`, or the next free one: `fairlead forward add 8080/tcp --on-conflict next --guest a`"},
		{"no next one is free", Facts{Host: true, Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", outcome(port.Conflict, "127.0.0.1:8080", port.Join(port.Because(port.InUse, "127.0.0.1:8080"), port.Because(port.NoneFree, "next", "64"))))}},
			"or give this port another one: `fairlead forward add 8080/tcp --to 18080`, or any free one: `fairlead forward add 8080/tcp --on-conflict any`"},
		{"by name", Facts{Publications: []Publication{pub(port.TCP, "172.17.0.2:8080", demanded("db:8080/tcp"), lost)}},
			"give this port another one: `fairlead forward add db:8080/tcp --to 18080`"},
		{"the host chose the port", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", outcome(port.Conflict, "127.0.0.1:9000", port.Because(port.InUse, "127.0.0.1:9000")))}},
			"give this port another one by the rules of the host, which chose 9000: on the host, `fairlead explain 8080/tcp` says how"},
		{"the same port of another address has it", Facts{Publications: []Publication{
			pub(port.TCP, "10.0.0.1:8080", outcome(port.Conflict, "127.0.0.1:8080", port.Because(port.HeldBy, "127.0.0.1:8080", "tcp 0.0.0.0:8080"))),
			pub(port.TCP, "0.0.0.0:8080", outcome(port.Active, "127.0.0.1:8080", none)),
		}}, `stop what has it, or give this port another one: add a rule for it to the agent's configuration, before the others: {match: {protocol: tcp, ports: 8080, address: "10.0.0.1"}, action: allow, hostPort: 18080}`},
		{"half in conflict", Facts{Publications: []Publication{pub(port.TCP, "[::]:8080", lost, outcome(port.Active, "[::1]:8080", none))}},
			"use [::1]:8080, or stop the program that uses 127.0.0.1:8080 on the host (fairlead takes the port over within seconds), or give this port another one: `fairlead forward add 8080/tcp --to 18080`"},
		{"denied at run time in the guest", Facts{Host: true, Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", deniedBy(port.RuleRef{Kind: port.RuleDeny, Number: 1, Name: "8080/tcp"}))}},
			"undo it in the guest by `fairlead allow` or `fairlead forward rm`; `fairlead forward ls` lists the rules"},
		{"denied by a label", Facts{Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", deniedBy(port.RuleRef{Kind: port.RuleLabel, Name: "label fairlead.expose: no"}))}},
			"change the label, or run `fairlead allow 8080/tcp`, or add a rule for the port to the agent's configuration: {match: {protocol: tcp, ports: 8080}, action: allow}"},
		{"denied by default in the guest", Facts{Host: true, Publications: []Publication{pub(port.UDP, "0.0.0.0:5353")}},
			"run `fairlead allow 5353/udp` in the guest, or add a rule for the port to the agent's configuration in the guest: {match: {protocol: udp, ports: 5353}, action: allow}"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.f.ForwardsFile = forwardsFile
			tt.f.Query.Port = tt.f.Publications[0].Port
			c := tt.f.chain(&tt.f.Publications[0])
			if !strings.HasSuffix(c.Next, tt.want) {
				t.Errorf("got  %s\nwant %s", c.Next, tt.want)
			}
		})
	}
}

// A guest may state any reason of a port that it does not publish.
func TestAnyReasonOfAnUnpublishedPort(t *testing.T) {
	file, err := os.ReadFile("../../port/testdata/codes.golden")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(file)) {
		name, _, _ := strings.Cut(line, ":")
		code, ok := port.ParseCode(name)
		if !ok {
			t.Fatal(name)
		}
		f := Facts{Host: true, Publications: []Publication{pub(port.TCP, "0.0.0.0:8080", func(p *Publication) {
			p.Decision = port.Decision{Reason: port.Because(code, "a", "b", "c")}
		})}}
		if c := f.chain(&f.Publications[0]); c.Verdict == "" {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

func deniedBy(rule port.RuleRef) func(*Publication) {
	return func(p *Publication) {
		p.Decision = port.Decision{Rule: rule, Reason: rule.Because(port.DeniedByRule)}
	}
}

// Where no rules can be added, a rule of the configuration is named, and it has the effect.
func TestRemedyWithoutForwardsFile(t *testing.T) {
	for _, at := range []string{"0.0.0.0:8080", "[::]:65535", "[fe80::1%eth0]:80"} {
		p := pub(port.TCP, at)
		host := netip.AddrPortFrom(port.Loopback(p.Address), p.Port)
		outcome(port.Conflict, host.String(), port.Because(port.InUse, host.String()))(&p)
		f := Facts{Query: Query{Port: p.Port}, Publications: []Publication{p}}
		_, rule, ok := strings.Cut(f.chain(&p).Next, "before the others: ")
		file, err := rules.Parse("agent.yaml", []byte("rules: ["+rule+"]"))
		if !ok || err != nil {
			t.Fatalf("%s: %q: %v", at, rule, err)
		}
		set, err := rules.New(rules.Loopback(), file.Rules)
		if err != nil {
			t.Fatal(err)
		}
		if d := set.Decide(p.Publication); !d.Allow || d.Host[0].Port() == p.Port || d.Host[0].Port() < 1024 {
			t.Errorf("%s: %+v", at, d)
		}
	}
	f := Facts{Publications: []Publication{pub(port.UDP, "0.0.0.0:5353")}}
	if next := f.chain(&f.Publications[0]).Next; strings.Contains(next, "fairlead allow") {
		t.Errorf("%q", next)
	}
}
