// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/port"
)

// labelledPort is tcp 0.0.0.0:N of a container "web", which an engine declares. Labels are
// "key=value", without the prefix of all.
func labelledPort(n uint16, labels ...string) port.Publication {
	p := port.Publication{
		Fact: port.Fact{
			Key:   port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n},
			Owner: port.Owner{Kind: port.OwnerContainer, ID: "c1", Name: "web", Labels: map[string]string{}},
		},
		Origins: []port.OriginInfo{{Origin: port.Origin{Source: "docker"}}},
	}
	for _, l := range labels {
		k, v, _ := strings.Cut(l, "=")
		p.Owner.Labels[port.LabelPrefix+k] = v
	}
	return p
}

// outcome writes a decision on one line.
func outcome(d port.Ruling) string {
	s := "deny"
	switch {
	case d.Pending():
		s = "pending"
	case d.Allow:
		s = fmt.Sprint(d.Host)
	}
	s += " by " + d.Rule.String()
	if d.Yields {
		s += ", yields"
	}
	if d.Alias != "" {
		s += ", name " + d.Alias
	}
	return s
}

func TestLabels(t *testing.T) {
	deny22 := Rule{Name: "no-ssh", Match: Match{Ports: []PortRange{{22, 22}}}, Deny: true}
	deny := Rule{Match: Match{Ports: []PortRange{{8080, 8080}}}, Deny: true}
	allow := Rule{Match: Match{Ports: []PortRange{{8080, 8080}}}}
	for name, tt := range map[string]struct {
		expose  HostAddress
		rules   []Rule
		runtime []Rule
		labels  []string
		change  func(*port.Publication)
		want    string
		warning string
	}{
		"none":              {want: "[127.0.0.1:8080] by default"},
		"close":             {labels: []string{"expose=no"}, want: "deny by label fairlead.expose: no"},
		"close, in capital": {labels: []string{"expose= False "}, want: "deny by label fairlead.expose: false"},
		"open":              {labels: []string{"expose=yes"}, want: "[127.0.0.1:8080] by label fairlead.expose: yes"},
		"narrow":            {expose: All(), labels: []string{"expose=loopback"}, want: "[127.0.0.1:8080] by label fairlead.expose: loopback"},
		"as wide":           {expose: All(), labels: []string{"expose=all"}, want: "[0.0.0.0:8080] by label fairlead.expose: all"},
		"wider": {labels: []string{"expose=all"}, want: "[127.0.0.1:8080] by default",
			warning: `container "web": label fairlead.expose: "all": wider than the configuration allows; it has no effect`},
		"wider, of one address": {expose: All(), labels: []string{"expose=all"}, want: "[127.0.0.1:8080] by default",
			change: func(p *port.Publication) { p.Address = netip.MustParseAddr("10.0.0.5") }, warning: "wider"},
		"wider, and another port": {labels: []string{"expose=all", "host-port=9"}, want: "[127.0.0.1:9] by label fairlead.host-port: 9, yields", warning: "wider"},
		"misspelt":                {labels: []string{"expose=maybe"}, want: "[127.0.0.1:8080] by default", warning: `"maybe": want yes, no, loopback or all`},
		"of a Service": {labels: []string{"expose=\x1b[2J"}, want: "[127.0.0.1:8080] by default", warning: `service "shop/web": label or annotation fairlead.expose: "\x1b[2J": want yes`,
			change: func(p *port.Publication) { p.Owner.Kind, p.Owner.Namespace = port.OwnerService, "shop" }},
		"of a process": {labels: []string{"expose=no"}, want: "[127.0.0.1:8080] by default",
			change: func(p *port.Publication) { p.Owner.Kind = port.OwnerProcess }},

		"a rule denies": {rules: []Rule{deny}, labels: []string{"expose=yes", "name=shop"}, want: "deny by rule 1",
			warning: `container "web": label fairlead.expose: "yes": the port is denied by rule 1; it has no effect`},
		"a rule allows":          {rules: []Rule{allow}, labels: []string{"expose=no", "host-port=9", "name=shop"}, want: "[127.0.0.1:8080] by rule 1, name shop"},
		"a rule allows less":     {rules: []Rule{allow}, labels: []string{"expose=all"}, want: "[127.0.0.1:8080] by rule 1", warning: "wider than rule 1 allows"},
		"a run-time rule denies": {runtime: []Rule{deny}, labels: []string{"expose=yes"}, want: "deny by runtime rule 1 (deny)", warning: "denied by runtime rule 1 (deny)"},
		"a run-time rule allows": {runtime: []Rule{allow}, labels: []string{"expose=no"}, want: "[127.0.0.1:8080] by runtime rule 1 (forward)"},
		"a default denies": {labels: []string{"expose=yes"}, want: "deny by default: udp well-known", warning: "denied by default: udp well-known",
			change: func(p *port.Publication) { p.Protocol, p.Port, p.Origins[0].Source = port.UDP, 53, "nat" }},
		"withheld": {labels: []string{"expose=yes", "host-port=9"}, want: "deny by default: withheld",
			change: func(p *port.Publication) { p.Origins[0].Withheld = port.Because(port.Unlistened) }},
		"owner pending":                    {labels: []string{"expose=yes"}, want: "pending by a label of its owner", change: func(p *port.Publication) { p.OwnerPending = true }},
		"owner pending, denied by a rule":  {rules: []Rule{deny}, want: "deny by rule 1", change: func(p *port.Publication) { p.OwnerPending = true }},
		"owner pending, allowed by a rule": {rules: []Rule{allow}, want: "[127.0.0.1:8080] by rule 1", change: func(p *port.Publication) { p.OwnerPending = true }},

		"another port":                      {labels: []string{"host-port=18080"}, want: "[127.0.0.1:18080] by label fairlead.host-port: 18080, yields"},
		"the same port":                     {labels: []string{"host-port=8080"}, want: "[127.0.0.1:8080] by label fairlead.host-port: 8080"},
		"any free port":                     {labels: []string{"host-port=0"}, want: "[127.0.0.1:0] by label fairlead.host-port: 0, yields"},
		"an offset":                         {labels: []string{"host-port=+1000"}, want: "[127.0.0.1:9080] by label fairlead.host-port: +1000, yields"},
		"an offset too far":                 {labels: []string{"host-port=-8080"}, want: "[127.0.0.1:8080] by default", warning: "host port 8080-8080 is not within 1 to 65535"},
		"by guest port":                     {labels: []string{"host-port=80 = 81,\n8080=\t18080"}, want: "[127.0.0.1:18080] by label fairlead.host-port: 80 = 81, 8080= 18080, yields"},
		"of other ports":                    {labels: []string{"host-port=80=81"}, want: "[127.0.0.1:8080] by default"},
		"one guest port twice":              {labels: []string{"host-port=80=81,80=82"}, want: "[127.0.0.1:8080] by default", warning: "each guest port once"},
		"a list of ports":                   {labels: []string{"host-port=81,82"}, want: "[127.0.0.1:8080] by default", warning: "want a host port"},
		"half a list":                       {labels: []string{"host-port=8080=81,"}, want: "[127.0.0.1:8080] by default", warning: "want a host port"},
		"too long":                          {labels: []string{"host-port=" + strings.Repeat("9", 300)}, want: "[127.0.0.1:8080] by default", warning: "longer than 256 bytes"},
		"a port that is denied":             {rules: []Rule{deny22}, labels: []string{"host-port=22"}, want: "[127.0.0.1:8080] by default", warning: "host port 22 is denied by rule 1 (no-ssh)"},
		"a port that is denied at run time": {runtime: []Rule{deny22}, labels: []string{"host-port=22"}, want: "[127.0.0.1:8080] by default", warning: "host port 22 is denied by runtime rule 1 (deny no-ssh)"},
		"a port that the container asked for": {labels: []string{"host-port=9"}, want: "[127.0.0.1:8080] by default", warning: "publish.allow",
			change: func(p *port.Publication) { p.Origins[0].Source = port.SourcePublish }},
		"close and move":  {labels: []string{"expose=no", "host-port=9"}, want: "deny by label fairlead.expose: no"},
		"narrow and move": {expose: All(), labels: []string{"expose=loopback", "host-port=9"}, want: "[127.0.0.1:9] by labels fairlead.expose: loopback, fairlead.host-port: 9, yields"},

		"a name":     {labels: []string{"name=Shop-1"}, want: "[127.0.0.1:8080] by default, name shop-1"},
		"bad name":   {labels: []string{"name=shop.evil"}, want: "[127.0.0.1:8080] by default", warning: "letters, digits and hyphens"},
		"empty name": {labels: []string{"name="}, want: "[127.0.0.1:8080] by default", warning: "want a name"},
	} {
		t.Run(name, func(t *testing.T) {
			set, err := New(tt.expose, tt.rules)
			if err == nil {
				set, err = set.WithRuntime(asRequested(tt.runtime))
			}
			if err != nil {
				t.Fatal(err)
			}
			p := labelledPort(8080, tt.labels...)
			if tt.change != nil {
				tt.change(&p)
			}
			plain := set.Decide(p)
			on := set.WithLabels(true)
			d := on.Decide(p)
			if got := outcome(d); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
			if got := strings.Join(d.Warnings, "\n"); (got == "") != (tt.warning == "") || !strings.Contains(got, tt.warning) {
				t.Errorf("warnings %q, want %q", got, tt.warning)
			}
			decide := 0
			for _, s := range on.Explain(p) {
				if s.Decides {
					decide++
					if s.Rule != d.Rule.String() && !d.Pending() {
						t.Errorf("explained by %q, decided by %q", s.Rule, d.Rule.String())
					}
				}
			}
			if decide != 1 {
				t.Errorf("%d steps decide: %+v", decide, on.Explain(p))
			}
			within(t, plain, d)
		})
	}
}

// within checks that labels open nothing that is denied without them, nor a wider address.
func within(t *testing.T, plain, d port.Ruling) {
	t.Helper()
	if d.Allow && !plain.Allow {
		t.Errorf("labels open what is denied: %+v", d)
	}
	for _, a := range d.Host {
		if !covered(a.Addr(), plain.Host) {
			t.Errorf("%s is wider than %s", a, plain.Host)
		}
	}
}

// A NAT rule that leads to a container which wants to be closed is closed with it.
func TestLabelOfAnotherOwner(t *testing.T) {
	p := labelledPort(8080)
	p.Owner = port.Owner{Kind: port.OwnerService, ID: "shop/web", Name: "web", Namespace: "shop"}
	p.Others = []port.OtherOwner{{Owner: labelledPort(80, "expose=no").Owner}}
	d := Empty(Loopback()).WithLabels(true).Decide(p)
	if d.Allow || d.Reason.String() != "denied by label fairlead.expose: no: container web serves it, too" {
		t.Errorf("%+v", d)
	}
	p.Others[0].Rival = true
	if d := Empty(Loopback()).WithLabels(true).Decide(p); !d.Pending() {
		t.Errorf("of rivals: %+v", d)
	}
}

func TestLabelsOff(t *testing.T) {
	p := labelledPort(8080, "expose=no", "name=shop", "host-port=9")
	set := Empty(Loopback())
	if got := outcome(set.Decide(p)); got != "[127.0.0.1:8080] by default" {
		t.Error(got)
	}
	if s := set.Explain(p)[0]; s.Rule != "labels" || !strings.Contains(s.Why, "labels: true") || s.Decides {
		t.Errorf("%+v", s)
	}
	if steps := set.Explain(labelledPort(8080)); len(steps) != 1 {
		t.Errorf("without labels: %+v", steps)
	}
	next, err := set.WithLabels(true).WithRuntime(nil)
	if err != nil {
		t.Fatal(err)
	}
	if outcome(next.Decide(p)) != "deny by label fairlead.expose: no" {
		t.Error("rules at run time end the obedience to labels")
	}
}

// A host's rule about a port is about its number on the host as well, where a label asks for it.
func TestHostDeniesWhatALabelAsksFor(t *testing.T) {
	set, err := New(Loopback(), []Rule{{Match: Match{Ports: []PortRange{{22, 22}}}, Deny: true}})
	if err != nil {
		t.Fatal(err)
	}
	p := labelledPort(8080)
	asked := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:22")}
	if d := set.Host("vm", p, asked); !d.Allow {
		t.Errorf("what the agent's rules move: %+v", d)
	}
	p.Decision.Yields = true
	deny, all := Rule{Match: Match{Ports: []PortRange{{22, 22}}}, Deny: true}, Rule{OnConflict: port.OnConflictNext}
	for name, s := range map[string]struct {
		rules, runtime []Rule
		allow          bool
	}{
		"a rule":                           {rules: []Rule{deny}},
		"a rule before one about all":      {rules: []Rule{deny, all}},
		"a rule behind one about all":      {rules: []Rule{all, deny}, allow: true},
		"a rule that gives another number": {rules: []Rule{{Match: Match{Ports: []PortRange{{8080, 8080}}}, HostPort: HostPort{kind: fixedPort, port: 90}}, deny}, allow: true},
		"a run-time rule":                  {runtime: []Rule{deny}},
	} {
		set, err := New(Loopback(), s.rules)
		if err == nil {
			set, err = set.WithRuntime(asRequested(s.runtime))
		}
		if err != nil {
			t.Fatal(err)
		}
		if d := set.Host("vm", p, asked); d.Allow != s.allow || !d.Allow && !strings.Contains(d.Reason.String(), "host port 22 that a label asks for") {
			t.Errorf("%s: %+v", name, d)
		}
	}
}

func FuzzLabels(f *testing.F) {
	f.Add("yes", "8080=18080, 80=0", "shop", uint16(8080))
	f.Add("all", "+1000", "-", uint16(65535))
	f.Add("\x1b[2J", "0=1", strings.Repeat("a", 64), uint16(1))
	deny, err := New(Loopback(), []Rule{{Match: Match{Ports: []PortRange{{1, 1023}}}, Deny: true}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, expose, hostPort, name string, n uint16) {
		p := labelledPort(n)
		p.Owner.Labels = map[string]string{LabelExpose: expose, LabelHostPort: hostPort, LabelName: name}
		d := deny.WithLabels(true).Decide(p)
		within(t, deny.Decide(p), d)
		for _, a := range d.Host {
			if a.Port() != 0 && a.Port() < 1024 {
				t.Fatalf("host port %d, which a rule denies", a.Port())
			}
		}
		for _, text := range append([]string{d.Rule.String(), d.Alias}, d.Warnings...) {
			if !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
				t.Fatalf("%q", text)
			}
		}
	})
}
