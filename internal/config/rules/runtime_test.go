// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// parsed returns the rules of a YAML list.
func parsed(t *testing.T, text string) []Rule {
	t.Helper()
	f, err := Parse("rules", []byte("rules: ["+text+"]"))
	if err != nil {
		t.Fatal(err)
	}
	return f.Rules
}

func withRuntime(t *testing.T, expose HostAddress, configured, runtime string) *Set {
	t.Helper()
	s, err := New(expose, parsed(t, configured))
	if err == nil {
		s, err = s.WithRuntime(asRequested(parsed(t, runtime)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// asRequested makes rules such as requests make. One that is called "until 12" exposes until then.
func asRequested(list []Rule) []Rule {
	list = slices.Clone(list)
	for i := range list {
		r := &list[i]
		r.Kind = port.RuleForward
		var hour int
		if n, _ := fmt.Sscanf(r.Name, "until %d", &hour); n == 1 {
			r.Kind, r.Name, r.Until = port.RuleExpose, "", time.Date(2026, 11, 21, hour, 0, 0, 0, time.UTC)
		}
		if r.Deny {
			r.Kind = port.RuleDeny
		}
	}
	return list
}

// short describes a decision in a few words.
func short(d port.Ruling) string {
	rule, _, _ := strings.Cut(d.Rule.String(), " (")
	switch {
	case d.Pending():
		return "pending " + rule
	case !d.Allow:
		return "denied " + rule
	}
	var at []string
	for _, a := range d.Host {
		at = append(at, a.String())
	}
	return strings.Join(at, " ") + " " + rule
}

func TestRuntimeRulesDecideAfterTheConfiguration(t *testing.T) {
	web := port.Publication{
		Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}, Owner: port.Owner{Kind: port.OwnerProcess, Name: "web"}},
	}
	dns := port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.UDP, Address: netip.IPv4Unspecified(), Port: 53}}}
	waiting := web
	waiting.OwnerPending, waiting.Owner = true, port.Owner{}
	for name, c := range map[string]struct {
		expose              HostAddress
		configured, runtime string
		of                  port.Publication
		want                string
	}{
		"no rule matches":                       {Loopback(), "", "{match: {ports: 81}, action: deny}", web, "127.0.0.1:80 default"},
		"a denial of the configuration stands":  {Loopback(), "{match: {ports: 80}, action: deny}", "{match: {ports: 80}, action: allow}", web, "denied rule 1"},
		"a broad rule of it does not forbid":    {Loopback(), "{action: allow}", "{match: {ports: 80}, action: deny}", web, "denied runtime rule 1"},
		"its host port is replaced":             {Loopback(), "{action: allow, hostPort: 8080}", "{action: allow, hostPort: 8081}", web, "127.0.0.1:8081 runtime rule 1"},
		"its host port remains":                 {Loopback(), "{action: allow, hostPort: 8080}", "{match: {ports: 80}, action: allow}", web, "127.0.0.1:8080 runtime rule 1"},
		"a default's denial is lifted":          {Loopback(), "", "{match: {ports: 53}, action: allow, hostPort: 5353}", dns, "127.0.0.1:5353 runtime rule 1"},
		"not by a rule that names no port":      {Loopback(), "", "{action: allow}", dns, "denied " + port.RuleRef{Kind: port.RuleUDP}.String()},
		"no wider address":                      {Loopback(), "", "{action: allow, hostAddress: all}", web, "127.0.0.1:80 runtime rule 1"},
		"a narrower one":                        {All(), "", "{action: allow, hostAddress: 192.0.2.1}", web, "192.0.2.1:80 runtime rule 1"},
		"no address of the other family":        {All(), "", "{action: allow, hostAddress: '2001:db8::1'}", web, "[::1]:80 runtime rule 1"},
		"an owner is waited for":                {Loopback(), "", "{match: {name: web}, action: deny}", waiting, "pending runtime rule 1"},
		"an owner in a rule of it decides late": {Loopback(), "{match: {name: web}, action: deny}", "{action: allow}", waiting, "pending rule 1"},
	} {
		s := withRuntime(t, c.expose, c.configured, c.runtime)
		if got := short(s.Decide(c.of)); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		decides := 0
		for _, step := range s.Explain(c.of) {
			if step.Decides {
				decides++
			}
		}
		if decides != 1 {
			t.Errorf("%s: %d steps decide: %+v", name, decides, s.Explain(c.of))
		}
	}
}

// On a host the same order holds, for the guest that a rule names.
func TestRuntimeRulesOfAHost(t *testing.T) {
	p := port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 80}}}
	asked := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:80")}
	s := withRuntime(t, Asked(), "{match: {guest: 'build*'}, action: deny}, {action: allow, onConflict: next}",
		"{match: {guest: dev}, action: allow, hostPort: 8080, hostAddress: all}, {match: {guest: old}, action: deny}")
	for guest, want := range map[string]string{
		"dev": "127.0.0.1:8080 host runtime rule 1", "old": "denied host runtime rule 2", "build1": "denied host rule 1", "vm": "127.0.0.1:80 host rule 2",
	} {
		d := s.Host(guest, p, asked)
		if got := short(d); got != want {
			t.Errorf("%s: %s, want %s", guest, got, want)
		}
		if d.Allow && d.OnConflict != port.OnConflictNext {
			t.Errorf("%s: on a conflict %q", guest, d.OnConflict)
		}
	}
}

// A port for which a rule of the configuration has no host port gets one of a run-time rule that
// names it, at no wider address than that rule has, and with the rest of it.
func TestRuntimeRuleOfAPortBeyondTheOffset(t *testing.T) {
	p := port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 60000}}}
	asked := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:60000")}
	const offset = "{match: {guest: build}, action: allow, hostPort: '+10000', onConflict: next%s}"
	forward := func(rest string) string { return "{match: {ports: 60000, protocol: tcp}, action: allow" + rest + "}" }
	for name, c := range map[string]struct {
		expose                        HostAddress
		configured, runtime, of, want string
	}{
		"none":               {Asked(), "", "", "build", "denied host rule 1"},
		"forward":            {Asked(), "", forward(", hostPort: 5000"), "build", "127.0.0.1:5000 host runtime rule 1"},
		"of another guest":   {Asked(), "", forward(", hostPort: 5000"), "dev", "127.0.0.1:5000 host runtime rule 1"},
		"without a number":   {Asked(), "", forward(""), "build", "denied host rule 1"},
		"of all ports":       {Asked(), "", "{action: allow, hostPort: '+1000'}", "build", "denied host rule 1"},
		"not on loopback":    {All(), "", forward(", hostPort: 5000, hostAddress: all"), "build", "0.0.0.0:5000 host runtime rule 1"},
		"loopback by a rule": {All(), ", hostAddress: loopback", forward(", hostPort: 5000, hostAddress: all"), "build", "127.0.0.1:5000 host runtime rule 1"},
		"paused":             {Asked(), "", "{action: deny}, " + forward(", hostPort: 5000"), "build", "denied host runtime rule 1"},
	} {
		d := withRuntime(t, c.expose, fmt.Sprintf(offset, c.configured), c.runtime).Host(c.of, p, asked)
		if got := short(d); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		if d.Allow && c.of == "build" && d.OnConflict != port.OnConflictNext {
			t.Errorf("%s: on a conflict %q", name, d.OnConflict)
		}
	}
	s := withRuntime(t, All(), "{match: {protocol: tcp}, action: allow, hostPort: '+10000', hostAddress: loopback}", forward(", hostPort: 5000, hostAddress: all"))
	if got := short(s.Decide(p)); got != "127.0.0.1:5000 runtime rule 1" {
		t.Errorf("on the agent: %s", got)
	}
}

func TestMayAllow(t *testing.T) {
	m := parsed(t, "{match: {protocol: tcp, ports: 80}, action: allow}")[0].Match
	everywhere := All()
	for _, c := range []struct {
		expose     HostAddress
		configured string
		at         HostAddress
		want       string
	}{
		{Loopback(), "", Asked(), ""},
		{Loopback(), "{match: {ports: 80}, action: deny}", Asked(), "rule 1 of the configuration denies it"},
		{Loopback(), "{match: {ports: 80}, action: allow}, {action: deny}", Asked(), ""},
		{Loopback(), "{match: {ports: 81}, action: allow}, {action: deny}", Asked(), "rule 2 of the configuration denies it"},
		{Loopback(), "{match: {ports: 80, name: x}, action: deny}", Asked(), ""},
		{Loopback(), "", everywhere, "wider than the configuration allows"},
		{All(), "", everywhere, ""},
		{Loopback(), "{match: {name: web}, action: allow, hostAddress: all}", everywhere, ""},
	} {
		err := withRuntime(t, c.expose, c.configured, "").MayAllow(m, c.at)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, %q, at %s: %v, want %q", c.expose, c.configured, c.at, err, c.want)
		}
	}
}

// What is exposed is open at more addresses, never beyond what the configuration's bind
// allows, nor against a rule of it.
func TestExposed(t *testing.T) {
	p := port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.1"), Port: 80}}}
	v4 := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:80")}
	both := []netip.AddrPort{v4[0], netip.MustParseAddrPort("[::1]:80")}
	lan, err := ParseHostAddress("192.0.2.1")
	if err != nil {
		t.Fatal(err)
	}
	const until = "action: allow, name: until 12"
	all := "{match: {ports: 80}, hostAddress: all, " + until + "}"
	one := "{match: {ports: 80}, hostAddress: 192.0.2.1, " + until + "}"
	dev := "{match: {ports: 80, guest: dev}, hostAddress: 192.0.2.1, action: allow, name: until 13}"
	other := "{match: {ports: 80}, hostAddress: 192.0.2.2, " + until + "}"
	for name, c := range map[string]struct {
		bind                HostAddress
		configured, runtime string
		asked               []netip.AddrPort
		want                string // addresses; with ! if exposed
	}{
		"everywhere":                        {Asked(), "", all, v4, "!0.0.0.0:80 127.0.0.1:80"},
		"both families":                     {All(), "", all, both, "!0.0.0.0:80 [::]:80 127.0.0.1:80 [::1]:80"},
		"one address, and the loopback":     {Asked(), "", one, v4, "!192.0.2.1:80 127.0.0.1:80"},
		"no further than an address":        {lan, "", all, v4, "!192.0.2.1:80 127.0.0.1:80"},
		"that address":                      {lan, "", one, v4, "!192.0.2.1:80 127.0.0.1:80"},
		"no further than the loopback":      {Loopback(), "", all, v4, "127.0.0.1:80"},
		"open anyhow":                       {Asked(), "", all, []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:80")}, "0.0.0.0:80"},
		"not against a rule":                {Asked(), "{action: allow, hostAddress: loopback}", all, v4, "127.0.0.1:80"},
		"not what is denied":                {Asked(), "{action: deny}", all, v4, ""},
		"not what is denied at run time":    {Asked(), "", "{action: deny}, " + all, v4, ""},
		"at its other port":                 {Asked(), "", "{action: allow, hostPort: 8080}, " + all, v4, "!0.0.0.0:8080 127.0.0.1:8080"},
		"not the other protocol":            {Asked(), "", "{match: {protocol: udp}, hostAddress: all, " + until + "}", v4, "127.0.0.1:80"},
		"not of another guest":              {Asked(), "", "{match: {guest: build}, hostAddress: all, " + until + "}", v4, "127.0.0.1:80"},
		"of this guest":                     {Asked(), "", "{match: {guest: dev}, hostAddress: all, " + until + "}", v4, "!0.0.0.0:80 127.0.0.1:80"},
		"also behind a narrower one":        {Asked(), "", dev + ", " + all, v4, "!0.0.0.0:80 127.0.0.1:80"},
		"and before it":                     {Asked(), "", all + ", " + dev, v4, "!0.0.0.0:80 127.0.0.1:80"},
		"two addresses":                     {Asked(), "", dev + ", " + other, v4, "!192.0.2.1:80 192.0.2.2:80 127.0.0.1:80"},
		"a rule about the host port, alone": {Asked(), "{action: allow, hostPort: 81}", all, v4, "!0.0.0.0:81 127.0.0.1:81"},
	} {
		d := withRuntime(t, c.bind, c.configured, c.runtime).Host("dev", p, c.asked)
		var at []string
		for _, a := range d.Host {
			at = append(at, a.String())
		}
		got := strings.Join(at, " ")
		if d.Exposed != nil {
			got = "!" + got
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if d.Exposed != nil && d.Exposed.Hour() != 12 && !strings.Contains(c.runtime, dev) || strings.Contains(c.runtime, dev) && d.Exposed.Hour() != 13 {
			t.Errorf("%s: until %s", name, d.Exposed)
		}
	}
}

func TestMayExpose(t *testing.T) {
	m := parsed(t, "{match: {protocol: tcp, ports: 80}, action: allow}")[0].Match
	lan, other := HostAddress{kind: oneAddress, addr: netip.MustParseAddr("192.0.2.1")}, HostAddress{kind: oneAddress, addr: netip.MustParseAddr("192.0.2.2")}
	for _, c := range []struct {
		bind, at   HostAddress
		configured string
		want       string
	}{
		{Loopback(), All(), "", "wider than the configuration allows"},
		{Loopback(), lan, "", "wider than the configuration allows"},
		{Asked(), Loopback(), "", "other machines do not reach it"},
		{Asked(), All(), "", ""},
		{Asked(), lan, "", ""},
		{All(), All(), "", ""},
		{lan, All(), "", ""},
		{lan, lan, "", ""},
		{lan, other, "", "wider than the configuration allows"},
		{Asked(), All(), "{match: {ports: 80}, action: deny}", "rule 1 of the configuration denies it"},
	} {
		err := withRuntime(t, c.bind, c.configured, "").MayExpose(m, c.at)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("bind %s, at %s: %v, want %q", c.bind, c.at, err, c.want)
		}
	}
}

// demanded is a port of a container that was asked for.
func demanded(address string, n uint16, texts ...string) port.Publication {
	p := port.Publication{
		Fact: port.Fact{
			Key:   port.Key{Protocol: port.TCP, Address: netip.MustParseAddr(address), Port: n},
			Owner: port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "1", Labels: map[string]string{"secret": "yes"}},
		},
	}
	for _, s := range texts {
		p.Origins = append(p.Origins, port.OriginInfo{Origin: port.Origin{Source: port.SourceDemand, ID: s}})
	}
	p.SetNamed("", texts)
	return p
}

// What was asked for by name gets the host port of its own rule, and the configuration's
// denials win, whatever they match by.
func TestDemand(t *testing.T) {
	plain := Rule{Kind: port.RuleForward, Match: Match{Protocol: port.TCP, Ports: []PortRange{{80, 80}}}, HostPort: FixedPort(8081)}
	runtime := []Rule{asking(t, "web:80/tcp", 8080), plain}
	asked, other := demanded("172.17.0.2", 80, "shop/web:80/tcp", "web:80/tcp"), demanded("172.17.0.2", 80, "api:80/tcp")
	for _, c := range []struct{ config, asked, other string }{
		{"rules: []", "127.0.0.1:8080", "127.0.0.1:8081"},
		{"rules: [{match: {source: demand}, action: deny}]", "denied by rule 1", "denied by rule 1"},
		{"rules: [{match: {name: web}, action: deny}]", "denied by rule 1", "denied by rule 1"},
		{"rules: [{match: {labels: {secret: '*'}}, action: deny}]", "denied by rule 1", "denied by rule 1"},
		{"rules: [{match: {ports: 80}, action: deny}]", "denied by rule 1", "denied by rule 1"},
		{"rules: [{match: {ports: 443}, action: allow}, {action: deny}]", "denied by rule 2", "denied by rule 2"},
		{"expose: all\nrules: []", "127.0.0.1:8080", "127.0.0.1:8081"}, // it is no wildcard
	} {
		file, err := Parse("config", []byte(c.config))
		if err != nil {
			t.Fatal(err)
		}
		base, err := New(file.Expose, file.Rules)
		if err != nil {
			t.Fatal(err)
		}
		s, err := base.WithRuntime(runtime)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range []struct {
			port.Publication
			want string
		}{{asked, c.asked}, {other, c.other}} {
			d := s.Decide(p.Publication)
			got := d.Reason.String()
			if d.Allow {
				got = d.Host[0].String()
			}
			if got != p.want {
				t.Errorf("%s: %s: %s, want %s", c.config, p.Origins[0].ID, got, p.want)
			}
		}
		if got := s.Demands(); len(got) != 1 || got[0].String() != "web:80/tcp" {
			t.Errorf("it asks for %v", got)
		}
	}
}

// asking returns the rule of a forward of what is asked for by name.
func asking(t *testing.T, demand string, to uint16) Rule {
	t.Helper()
	d, err := port.ParseDemand(demand)
	if err != nil {
		t.Fatal(err)
	}
	return Rule{Kind: port.RuleForward, Match: Match{Protocol: d.Protocol, Ports: []PortRange{{d.Port, d.Port}}, Demand: d}, HostPort: FixedPort(to)}
}

func TestDemands(t *testing.T) {
	denied := asking(t, "c:4", 4)
	denied.Deny, denied.HostPort = true, HostPort{}
	s, err := Empty(Asked()).WithRuntime([]Rule{asking(t, "a:1", 1), asking(t, "b:2/udp", 2), asking(t, "b:2/udp", 3), denied})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(s.Demands()), "[a:1/tcp b:2/udp]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// What only requests do is no key of a rule in a file.
func TestOnlyRequestsExposeAndAskByName(t *testing.T) {
	for text, want := range map[string]string{
		`{match: {protocol: tcp, ports: 80, demand: "web:80"}, action: allow}`: `unknown key "demand"`,
		`{action: allow, until: 2026-11-21T12:00:00Z}`:                         `unknown key "until"`,
		`{action: expose}`: `"expose": want allow or deny`,
	} {
		if _, err := Parse("rules", []byte("rules: ["+text+"]")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// A rule says that the server is told of clients; a forward that was added beside it leaves that.
func TestProxyProtocol(t *testing.T) {
	file, err := Parse("r.yaml", []byte("rules: [{match: {protocol: tcp, ports: 25}, action: allow, proxyProtocol: v2}]"))
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Asked(), file.Rules)
	if err != nil {
		t.Fatal(err)
	}
	mail := port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.MustParseAddr("127.0.0.1"), Port: 25}}}
	other := mail
	other.Port = 26
	check := func(when string) {
		t.Helper()
		if d, e := s.Decide(mail), s.Decide(other); d.ProxyProtocol != port.ProxyProtocolV2 || e.ProxyProtocol != port.ProxyProtocolNone || !d.Allow {
			t.Errorf("%s: %+v, %+v", when, d, e)
		}
	}
	check("a rule of the configuration")
	if steps := s.Explain(mail); steps[0].Why != "allow, PROXY protocol v2" {
		t.Errorf("%+v", steps)
	}
	d := s.Decide(mail)
	told, untold := mail, mail
	told.Apply(d)
	untold.Apply(d)
	if untold.ProxyProtocol = port.ProxyProtocolNone; told.Equal(untold) {
		t.Error("a port whose server is told is equal to one whose server is not")
	}
	if s, err = s.WithRuntime([]Rule{{Kind: port.RuleForward, Match: Match{Protocol: port.TCP, Ports: []PortRange{{25, 25}}}, HostPort: FixedPort(2525)}}); err != nil {
		t.Fatal(err)
	}
	check("with a forward")
}
