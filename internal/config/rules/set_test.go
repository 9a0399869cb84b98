// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/port"
)

// pub makes a publication: "tcp 0.0.0.0:80".
func pub(t testing.TB, s string) port.Publication {
	t.Helper()
	proto, addr, _ := strings.Cut(s, " ")
	p := port.Publication{Origins: []port.OriginInfo{{Origin: port.Origin{Source: "socket", ID: "1"}}}}
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	if p.Protocol, err = port.ParseProtocol(proto); err != nil {
		t.Fatal(err)
	}
	p.Address, p.Port = ap.Addr(), ap.Port()
	return p
}

func mustSet(t testing.TB, yaml string) *Set {
	t.Helper()
	f, err := Parse("rules.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(f.Expose, f.Rules)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// verdict is a decision as one line: "127.0.0.1:80 [::1]:80 (default)".
func verdict(d port.Ruling) string {
	if !d.Allow {
		if len(d.Host) > 0 {
			return "denied, with host addresses"
		}
		return fmt.Sprintf("denied (%s): %s", d.Rule.String(), d.Reason.String())
	}
	var words []string
	for _, a := range d.Host {
		words = append(words, a.String())
	}
	return strings.Join(append(words, "("+d.Rule.String()+")"), " ")
}

func TestDefaults(t *testing.T) {
	const udp = "denied (default: udp well-known): a service of the guest's own network; an allow rule that names the port publishes it"
	for _, tt := range []struct{ pub, loopback, all string }{
		{"tcp 0.0.0.0:80", "127.0.0.1:80 (default)", "0.0.0.0:80 (default)"},
		{"tcp [::]:80", "[::1]:80 (default)", "[::]:80 (default)"},
		{"udp 0.0.0.0:514", "127.0.0.1:514 (default)", "0.0.0.0:514 (default)"},
		// Only a wildcard is opened wide.
		{"tcp 127.0.0.1:80", "127.0.0.1:80 (default)", "127.0.0.1:80 (default)"},
		{"tcp 127.0.0.53:80", "127.0.0.1:80 (default)", "127.0.0.1:80 (default)"},
		{"tcp [::1]:80", "[::1]:80 (default)", "[::1]:80 (default)"},
		{"tcp 192.168.5.2:80", "127.0.0.1:80 (default)", "127.0.0.1:80 (default)"},
		{"tcp [fd00::1]:80", "[::1]:80 (default)", "[::1]:80 (default)"},
		{"tcp [fe80::1%eth0]:80", "[::1]:80 (default)", "[::1]:80 (default)"},
		{"udp 0.0.0.0:53", udp, udp},
		{"udp 0.0.0.0:67", udp, udp},
		{"udp 0.0.0.0:68", udp, udp},
		{"udp [::]:123", udp, udp},
		{"udp 0.0.0.0:137", udp, udp},
		{"udp 192.168.5.2:138", udp, udp},
		{"udp 127.0.0.1:323", udp, udp},
		{"udp [fe80::1%eth0]:546", udp, udp},
		{"udp [::]:547", udp, udp},
		{"udp 0.0.0.0:1900", udp, udp},
		{"udp [::]:3702", udp, udp},
		{"udp [::]:5353", udp, udp},
		{"udp 0.0.0.0:5355", udp, udp},
		{"udp 0.0.0.0:139", "127.0.0.1:139 (default)", "0.0.0.0:139 (default)"},
		{"tcp 0.0.0.0:53", "127.0.0.1:53 (default)", "0.0.0.0:53 (default)"},
	} {
		for expose, want := range map[string]string{"loopback": tt.loopback, "all": tt.all} {
			if got := verdict(mustSet(t, "expose: "+expose).Decide(pub(t, tt.pub))); got != want {
				t.Errorf("%s, expose %s: %s, want %s", tt.pub, expose, got, want)
			}
		}
	}
}

func TestRules(t *testing.T) {
	web := func(p *port.Publication) {
		p.Owner = port.Owner{Kind: port.OwnerContainer, Name: "proj/web-1", Namespace: "prod",
			Labels: map[string]string{"tier": "front", "empty": ""}}
		p.Origins = append(p.Origins, port.OriginInfo{Origin: port.Origin{Source: "docker"}})
	}
	for _, tt := range []struct{ match, pub, want string }{
		{"{}", "tcp 0.0.0.0:80", "yes"},
		{"{protocol: tcp}", "tcp 0.0.0.0:80", "yes"},
		{"{protocol: TCP}", "tcp 0.0.0.0:80", "yes"},
		{"{protocol: udp}", "tcp 0.0.0.0:80", "protocol is tcp, not udp"},
		{"{ports: 80}", "tcp 0.0.0.0:80", "yes"},
		{`{ports: "80"}`, "tcp 0.0.0.0:80", "yes"},
		{"{ports: 79-81}", "tcp 0.0.0.0:80", "yes"},
		{"{ports: '1, 79-80'}", "tcp 0.0.0.0:80", "yes"},
		{"{ports: [1, 80-80]}", "tcp 0.0.0.0:80", "yes"},
		{"{ports: [81-90, 1]}", "tcp 0.0.0.0:80", "port is 80, not 81-90 or 1"},
		{"{address: wildcard}", "tcp 0.0.0.0:80", "yes"},
		{"{address: wildcard}", "tcp [::]:80", "yes"},
		{"{address: wildcard}", "tcp 127.0.0.1:80", "address is 127.0.0.1, not wildcard"},
		{"{address: loopback}", "tcp 127.9.9.9:80", "yes"},
		{"{address: loopback}", "tcp [::1]:80", "yes"},
		{"{address: loopback}", "tcp [::]:80", "address is ::, not loopback"},
		{"{address: 0.0.0.0}", "tcp [::]:80", "address is ::, not 0.0.0.0"},
		{"{address: 0.0.0.0}", "tcp [::]:80", "address is ::, not 0.0.0.0"},
		{"{address: 10.0.0.0/8}", "tcp 10.1.2.3:80", "yes"},
		{"{address: 10.0.0.0/8}", "tcp 11.1.2.3:80", "address is 11.1.2.3, not 10.0.0.0/8"},
		{"{address: fe80::/10}", "tcp [fe80::1%eth0]:80", "yes"},
		{"{address: ['::1', 10.0.0.1]}", "tcp 10.0.0.1:80", "yes"},
		{"{address: '::ffff:10.0.0.1'}", "tcp 10.0.0.1:80", "yes"},
		{"{source: docker}", "tcp 0.0.0.0:80", "yes"},
		{"{source: socket}", "tcp 0.0.0.0:80", "yes"},
		{"{source: [nat, kube]}", "tcp 0.0.0.0:80", "source is socket and docker, not nat or kube"},
		{"{owner: container}", "tcp 0.0.0.0:80", "yes"},
		{"{owner: [process, unknown]}", "tcp 0.0.0.0:80", "owner is container, not process or unknown"},
		{"{name: proj/web-1}", "tcp 0.0.0.0:80", "yes"},
		{"{name: 'p*-?'}", "tcp 0.0.0.0:80", "yes"},
		{"{name: web}", "tcp 0.0.0.0:80", `name is "proj/web-1", not "web"`},
		{"{namespace: pro*}", "tcp 0.0.0.0:80", "yes"},
		{"{namespace: test}", "tcp 0.0.0.0:80", `namespace is "prod", not "test"`},
		{"{labels: {tier: fr*}}", "tcp 0.0.0.0:80", "yes"},
		{"{labels: {empty: '*', tier: front}}", "tcp 0.0.0.0:80", "yes"},
		{"{labels: {tier: back}}", "tcp 0.0.0.0:80", `label "tier" is "front", not "back"`},
		{"{labels: {a: '*', tier: front}}", "tcp 0.0.0.0:80", `label "a" is missing`},
		{"{protocol: tcp, ports: 80, owner: service}", "tcp 0.0.0.0:80", "owner is container, not service"},
	} {
		s := mustSet(t, "rules:\n- {action: deny, match: "+tt.match+"}")
		p := pub(t, tt.pub)
		web(&p)
		d, steps := s.Decide(p), s.Explain(p)
		if (tt.want == "yes") != (d.Rule.String() == "rule 1") || d.Allow == (tt.want == "yes") {
			t.Errorf("%s: %s: decided by %s", tt.match, tt.pub, d.Rule.String())
		}
		want := tt.want
		if want == "yes" {
			want = "deny"
		}
		if steps[0].Why != want || steps[0].Matched != (tt.want == "yes") {
			t.Errorf("%s: %s: %+v, want %q", tt.match, tt.pub, steps[0], want)
		}
	}
}

func TestActions(t *testing.T) {
	for _, tt := range []struct{ name, rules, pub, want string }{
		{"first match wins", "[{action: allow, name: a, match: {ports: 80}}, {action: deny}]",
			"tcp 0.0.0.0:80", "127.0.0.1:80 (rule 1 (a))"},
		{"deny", "[{action: allow, match: {ports: 81}}, {name: no-debug, action: deny}]",
			"tcp 0.0.0.0:80", "denied (rule 2 (no-debug)): denied by rule 2 (no-debug)"},
		{"port", "[{action: allow, hostPort: 9090}]", "tcp [::]:80", "[::1]:9090 (rule 1)"},
		{"any port", "[{action: allow, hostPort: 0}]", "tcp 0.0.0.0:80", "127.0.0.1:0 (rule 1)"},
		{"offset", "[{action: allow, hostPort: +1000}]", "tcp 0.0.0.0:80", "127.0.0.1:1080 (rule 1)"},
		{"offset in a range", "[{action: allow, match: {ports: 80-90}, hostPort: '-10'}]", "tcp 0.0.0.0:81", "127.0.0.1:71 (rule 1)"},
		{"offset too far", "[{action: allow, hostPort: +1000}]", "tcp 0.0.0.0:65000",
			"denied (rule 1): rule 1: host port 65000+1000 is not within 1 to 65535"},
		{"offset too low", "[{action: allow, hostPort: -80}]", "tcp 0.0.0.0:80",
			"denied (rule 1): rule 1: host port 80-80 is not within 1 to 65535"},
		{"open", "[{action: allow, hostAddress: all}]", "tcp [::]:80", "[::]:80 (rule 1)"},
		{"open a loopback explicitly", "[{action: allow, hostAddress: all}]", "tcp 127.0.0.1:80", "0.0.0.0:80 (rule 1)"},
		{"open a specific address", "[{action: allow, hostAddress: all}]", "tcp [fd00::1]:80", "[::]:80 (rule 1)"},
		{"one address", "[{action: allow, hostAddress: 192.168.1.5, hostPort: 81}]", "tcp [::]:80", "192.168.1.5:81 (rule 1)"},
		{"allow UDP by its port", "[{action: allow, match: {ports: 53}}]", "udp 0.0.0.0:53", "127.0.0.1:53 (rule 1)"},
		{"a broad allow does not allow UDP 53", "[{action: allow, match: {protocol: udp}, hostAddress: all}]", "udp 0.0.0.0:53",
			"denied (default: udp well-known): a service of the guest's own network; an allow rule that names the port publishes it"},
		{"deny UDP 53 by a rule", "[{action: deny}]", "udp 0.0.0.0:53", "denied (rule 1): denied by rule 1"},
	} {
		s := mustSet(t, "rules: "+tt.rules)
		if got := verdict(s.Decide(pub(t, tt.pub))); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
	// A rule can keep to loopback what the set exposes.
	s := mustSet(t, "{expose: all, rules: [{action: allow, match: {ports: 80}, hostAddress: loopback}]}")
	if got, want := verdict(s.Decide(pub(t, "tcp 0.0.0.0:80"))), "127.0.0.1:80 (rule 1)"; got != want {
		t.Errorf("loopback under expose all: %s, want %s", got, want)
	}
}

func TestWithheld(t *testing.T) {
	p := pub(t, "tcp 0.0.0.0:80")
	p.Origins[0].Withheld = port.Because(port.Unlistened)
	limited := p
	limited.Origins = append(slices.Clone(p.Origins), p.Origins[0],
		port.OriginInfo{Origin: port.Origin{Source: "nat"}, Withheld: port.Because(port.FromSources, "10.0.0.0/8")})
	claimed := p
	claimed.Origins = append(slices.Clone(p.Origins), port.OriginInfo{Origin: port.Origin{Source: "docker"}})
	for _, tt := range []struct {
		name, rules string
		pub         port.Publication
		want        string
	}{
		{"no rule", "[]", p, "denied (default: withheld): bound, not listening"},
		{"all reasons, once each", "[]", limited, "denied (default: withheld): bound, not listening; limited to source 10.0.0.0/8"},
		{"another origin", "[]", claimed, "127.0.0.1:80 (default)"},
		{"a rule for the port", "[{action: allow, match: {ports: 80}}]", limited, "127.0.0.1:80 (rule 1)"},
		{"a broad rule", "[{action: allow, hostAddress: all}]", p, "denied (default: withheld): bound, not listening"},
		{"a broad rule, then one for the port", "[{action: allow, hostAddress: all}, {action: allow, match: {ports: 1-100}}]", p,
			"127.0.0.1:80 (rule 2)"},
		{"a broad rule and another origin", "[{action: allow, hostAddress: all}]", claimed, "0.0.0.0:80 (rule 1)"},
	} {
		if got := verdict(mustSet(t, "rules: "+tt.rules).Decide(tt.pub)); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

func addrPorts(t testing.TB, s string) []netip.AddrPort {
	t.Helper()
	var list []netip.AddrPort
	for f := range strings.FieldsSeq(s) {
		a, err := netip.ParseAddrPort(f)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, a)
	}
	return list
}

func TestHost(t *testing.T) {
	for _, tt := range []struct{ expose, rules, pub, asked, want string }{
		{"asked", "[]", "tcp [::]:80", "127.0.0.1:80 [::1]:80", "127.0.0.1:80 [::1]:80 (host default)"},
		{"asked", "[]", "tcp 0.0.0.0:80", "0.0.0.0:80", "0.0.0.0:80 (host default)"},
		{"asked", "[]", "tcp 0.0.0.0:80", "[::ffff:127.0.0.1]:80", "127.0.0.1:80 (host default)"},
		{"asked", "[]", "udp 0.0.0.0:53", "127.0.0.1:53", "127.0.0.1:53 (host default)"},
		{"asked", "[]", "tcp 0.0.0.0:80", "", "denied (host default): the guest asks for no host address"},
		{"loopback", "[]", "tcp 0.0.0.0:80", "0.0.0.0:80 127.0.0.1:80 [::]:81", "127.0.0.1:80 [::1]:81 (host default)"},
		{"loopback", "[]", "tcp 127.0.0.1:80", "192.168.1.5:80", "127.0.0.1:80 (host default)"},
		{"loopback", "[]", "tcp 127.0.0.1:80", "127.0.0.9:80", "127.0.0.9:80 (host default)"},
		{"all", "[]", "tcp [::]:80", "127.0.0.1:81 [::1]:81", "0.0.0.0:81 [::]:81 (host default)"},
		{"all", "[]", "tcp 127.0.0.1:80", "127.0.0.1:80", "127.0.0.1:80 (host default)"},
		{"192.168.1.5", "[]", "tcp [::]:80", "127.0.0.1:80 [::1]:80", "192.168.1.5:80 (host default)"},
		{"192.168.1.5", "[]", "tcp 10.0.0.1:80", "127.0.0.1:80", "127.0.0.1:80 (host default)"},
		{"192.168.1.5", "[]", "tcp 127.0.0.1:80", "0.0.0.0:80", "192.168.1.5:80 (host default)"},
		{"192.168.1.5", "[]", "tcp 127.0.0.1:80", "[::]:80", "[::1]:80 (host default)"},
		{"192.168.1.5", "[]", "tcp 127.0.0.1:80", "192.168.1.6:80", "127.0.0.1:80 (host default)"},
		{"192.168.1.5", "[]", "tcp 127.0.0.1:80", "192.168.1.5:80", "192.168.1.5:80 (host default)"},
		{"asked", "[{name: no, action: deny}]", "tcp 0.0.0.0:80", "127.0.0.1:80", "denied (host rule 1 (no)): denied by host rule 1 (no)"},
		{"asked", "[{action: allow, hostPort: +1}]", "tcp 0.0.0.0:80", "127.0.0.1:90 [::1]:0", "127.0.0.1:91 [::1]:0 (host rule 1)"},
		{"asked", "[{action: allow, hostAddress: loopback}]", "tcp 0.0.0.0:80", "0.0.0.0:80", "127.0.0.1:80 (host rule 1)"},
		{"asked", "[{action: allow, hostAddress: all}]", "tcp 127.0.0.1:80", "127.0.0.1:80", "0.0.0.0:80 (host rule 1)"},
		{"loopback", "[{action: allow, match: {ports: 80}}]", "tcp 0.0.0.0:80", "0.0.0.0:80", "127.0.0.1:80 (host rule 1)"},
	} {
		expose := Asked()
		if tt.expose != "asked" {
			var err error
			if expose, err = ParseHostAddress(tt.expose); err != nil {
				t.Fatal(err)
			}
		}
		f, err := Parse("host.yaml", []byte("rules: "+tt.rules))
		if err != nil {
			t.Fatal(err)
		}
		s, err := New(expose, f.Rules)
		if err != nil {
			t.Fatal(err)
		}
		asked := addrPorts(t, tt.asked)
		kept := slices.Clone(asked)
		if got := verdict(s.Host("vm", pub(t, tt.pub), asked)); got != tt.want {
			t.Errorf("expose %s, rules %s, %s asks %s: %s, want %s", tt.expose, tt.rules, tt.pub, tt.asked, got, tt.want)
		}
		if !slices.Equal(kept, asked) {
			t.Errorf("what is asked was changed: %v", asked)
		}
	}
}

// Whatever is asked, a host opens nothing wider than what its user allows and the guest
// asks for.
func TestHostNeverWider(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	addrs := []string{"0.0.0.0", "::", "127.0.0.1", "127.0.0.7", "::1", "192.168.1.5", "fd00::1"}
	pick := func() netip.Addr { return netip.MustParseAddr(addrs[rnd.IntN(len(addrs))]) }
	lists := []string{"[]", "[{action: allow, hostPort: +10}]", "[{action: allow, hostAddress: loopback}]", "[{action: allow, hostPort: 0}]"}
	for range 5000 {
		f, err := Parse("", []byte("rules: "+lists[rnd.IntN(len(lists))]))
		if err != nil {
			t.Fatal(err)
		}
		one := pick()
		expose := []HostAddress{Asked(), Loopback(), All(), {kind: oneAddress, addr: one}}[rnd.IntN(4)]
		s, err := New(expose, f.Rules)
		if err != nil {
			t.Fatal(err)
		}
		p := port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: pick(), Port: 80}}}
		var asked []netip.AddrPort
		for range 1 + rnd.IntN(3) {
			asked = append(asked, netip.AddrPortFrom(pick(), 80))
		}
		for _, h := range s.Host("vm", p, asked).Host {
			within := slices.ContainsFunc(asked, func(a netip.AddrPort) bool { return covers(a.Addr(), h.Addr()) })
			widened := port.IsWildcard(p.Address) && (expose == All() && h.Addr().IsUnspecified() || expose.kind == oneAddress && covers(one, h.Addr()))
			if !within && !widened {
				t.Fatalf("%s asks %v and gets %v on a host that binds %s", p.Key, asked, h, expose)
			}
			if expose == Loopback() && !h.Addr().IsLoopback() || expose.kind == oneAddress && !covers(one, h.Addr()) && !h.Addr().IsLoopback() {
				t.Fatalf("%s asks %v and gets %v on a host that binds %s", p.Key, asked, h, expose)
			}
		}
	}
}

// covers reports whether b is no wider than a: loopback is narrower than any other.
func covers(a, b netip.Addr) bool {
	return a.Is4() == b.Is4() && (a == b || a.IsUnspecified() || b.IsLoopback())
}

func TestExplain(t *testing.T) {
	s := mustSet(t, `
rules:
- {name: web, match: {ports: 80}, action: allow, hostPort: 8080, hostAddress: all}
- {action: allow, match: {protocol: udp}}
- {action: deny, match: {ports: 53}}
- {action: deny}
`)
	want := []Step{
		{"rule 1 (web)", false, false, "port is 53, not 80"},
		{"rule 2", true, false, "passed over: to allow what is denied by default, a rule must name its port"},
		{"rule 3", true, true, "deny"},
		{"rule 4", true, false, "deny"},
		{"default: udp well-known", true, false, "a service of the guest's own network; an allow rule that names the port publishes it"},
		{"default", true, false, "allow"},
	}
	if diff := cmp.Diff(want, s.Explain(pub(t, "udp 0.0.0.0:53"))); diff != "" {
		t.Error(diff)
	}
}

func TestNewRefuses(t *testing.T) {
	offset, err := ParseHostPort("+1")
	if err != nil {
		t.Fatal(err)
	}
	for want, r := range map[string]Rule{
		"rule 2 (x): hostPort: +1: only a rule with action allow has a host port":                                                            {Deny: true, HostPort: offset},
		"rule 2 (x): hostAddress: all: only a rule with action allow has a host address":                                                     {Deny: true, HostAddress: All()},
		`rule 2 (x): match.source: "sockte": want socket, nat, docker, podman, containerd, kube, publish or demand (did you mean "socket"?)`: {Match: Match{Sources: []string{"sockte"}}},
		`rule 2 (x): hostPort: "+1": port 65535 would become 65536, want 1 to 65535`:                                                         {HostPort: offset, Match: Match{Ports: []PortRange{{1, 65535}}}},
	} {
		r.Name = "x"
		if _, err := New(Loopback(), []Rule{{}, r}); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A set does not change with the list that it was made of.
func TestSetIsImmutable(t *testing.T) {
	list := []Rule{{Deny: true, Match: Match{Ports: []PortRange{{80, 80}}, Labels: map[string]string{"a": "b"}}}}
	s, err := New(Loopback(), list)
	if err != nil {
		t.Fatal(err)
	}
	list[0].Match.Ports[0] = PortRange{81, 81}
	list[0].Match.Labels["a"] = "c"
	list[0].Deny = false
	p := pub(t, "tcp 0.0.0.0:80")
	p.Owner.Labels = map[string]string{"a": "b"}
	if s.Decide(p).Allow || s.Len() != 1 {
		t.Error("the set changed")
	}
}

func TestGlob(t *testing.T) {
	for _, tt := range []struct {
		pattern, s string
		want       bool
	}{
		{"", "", true}, {"", "a", false}, {"*", "", true}, {"*", "a/b", true}, {"a", "a", true}, {"a", "b", false},
		{"a*", "a", true}, {"a*c", "abbc", true}, {"a*c", "abbd", false}, {"*a*b", "xaxab", true}, {"?", "", false},
		{"?b", "ab", true}, {"a**", "a", true}, {"*?", "", false}, {"*ab*", "aab", true}, {"a", "aa", false},
	} {
		if got := glob(tt.pattern, tt.s); got != tt.want {
			t.Errorf("glob(%q, %q) = %v", tt.pattern, tt.s, got)
		}
	}
}

// fifty is a set of 50 rules of which none matches what the benchmark decides.
func fifty(t testing.TB) *Set {
	var b strings.Builder
	b.WriteString("rules:\n")
	for i := range 10 {
		fmt.Fprintf(&b, `
- {action: deny, match: {ports: [%d, 2000-3000]}}
- {action: deny, match: {protocol: udp, ports: 1-100}}
- {action: deny, match: {address: [10.%d.0.0/16, loopback]}}
- {action: allow, match: {owner: container, name: "other-*-%d"}, hostPort: 9090}
- {action: allow, match: {labels: {tier: "b*"}}, hostAddress: all}
`, i+1, i, i)
	}
	return mustSet(t, b.String())
}

func benchPub(t testing.TB) port.Publication {
	p := pub(t, "tcp [::]:8080")
	p.Owner = port.Owner{Kind: port.OwnerContainer, Name: "other-web", Labels: map[string]string{"tier": "front"}}
	return p
}

// A decision allocates the host addresses and nothing else.
func TestDecideAllocates(t *testing.T) {
	s, p := fifty(t), benchPub(t)
	if n := testing.AllocsPerRun(100, func() { s.Decide(p) }); n > 1 {
		t.Errorf("%v allocations, want 1", n)
	}
}

func BenchmarkDecide(b *testing.B) {
	s, p := fifty(b), benchPub(b)
	b.ReportAllocs()
	for b.Loop() {
		s.Decide(p)
	}
}

// While an engine may still name the owner, a rule that names one neither matches
// nor fails to match: the port waits if that makes a difference.
func TestRuleThatNamesAnOwnerWaitsForIt(t *testing.T) {
	deny := func(m Match) Rule { return Rule{Match: m, Deny: true} }
	allow := func(m Match) Rule { return Rule{Match: m} }
	secret := Match{Name: "secret*"}
	for _, c := range []struct {
		name  string
		rules []Rule
		want  string // "pending", or what Decide says without an engine
	}{
		{"no rules", nil, "allow"},
		{"no rule about owners", []Rule{deny(Match{Ports: []PortRange{{1, 2}}})}, "allow"},
		{"deny by name", []Rule{deny(secret)}, "pending"},
		{"deny by namespace", []Rule{deny(Match{Namespace: "prod"})}, "pending"},
		{"deny by label", []Rule{deny(Match{Labels: map[string]string{"zone": "internal"}})}, "pending"},
		{"deny by kind", []Rule{deny(Match{Owners: []port.OwnerKind{port.OwnerContainer}})}, "pending"},
		{"deny what the owner is now", []Rule{deny(Match{Name: "docker-proxy"})}, "pending"},
		{"deny by name of another port", []Rule{deny(Match{Name: "secret*", Ports: []PortRange{{1, 2}}})}, "allow"},
		{"deny by name of another protocol", []Rule{deny(Match{Name: "secret*", Protocol: port.UDP})}, "allow"},
		{"deny by name of another source", []Rule{deny(Match{Name: "secret*", Sources: []string{"kube"}})}, "allow"},
		{"allow the port first", []Rule{allow(Match{Ports: []PortRange{{8200, 8200}}}), deny(secret)}, "allow"},
		{"deny the port anyway", []Rule{deny(secret), deny(Match{Ports: []PortRange{{8200, 8200}}})}, "deny"},
		{"allow by name, as by default", []Rule{allow(secret)}, "allow"},
		{"allow by name, deny all else", []Rule{allow(secret), deny(Match{})}, "pending"},
		{"allow by name, at another port", []Rule{{Match: secret, HostPort: HostPort{kind: fixedPort, port: 9000}}}, "pending"},
		{"allow by name, elsewhere", []Rule{{Match: secret, HostAddress: All()}}, "pending"},
	} {
		set, err := New(Loopback(), c.rules)
		if err != nil {
			t.Fatal(err)
		}
		p := port.Publication{
			Fact: port.Fact{
				Key:   port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8200},
				Owner: port.Owner{Kind: port.OwnerProcess, Name: "docker-proxy"}, OwnerPending: true,
			},
			Origins: []port.OriginInfo{{Origin: port.Origin{Source: "socket"}}},
		}
		got := "deny"
		switch d := set.Decide(p); {
		case d.Pending() && (d.Allow || d.Reason.String() != "owner not known yet" || len(d.Host) > 0):
			t.Errorf("%s: a pending decision is %+v", c.name, d)
		case d.Pending():
			got = "pending"
		case d.Allow:
			got = "allow"
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		decides := 0
		for _, s := range set.Explain(p) {
			if s.Decides {
				decides++
			}
		}
		if decides != 1 {
			t.Errorf("%s: %d steps decide: %+v", c.name, decides, set.Explain(p))
		}
		if p.OwnerPending = false; set.Decide(p).Pending() {
			t.Errorf("%s: pending though the owner is known", c.name)
		}
	}
}

// Who publishes 53/udp of a container has named the port.
func TestDeclaredWellKnownPortIsPublished(t *testing.T) {
	for _, source := range []string{"docker", "containerd", "kube", "socket", "nat"} {
		for _, n := range []uint16{53, 5353} {
			p := port.Publication{
				Fact:    port.Fact{Key: port.Key{Protocol: port.UDP, Address: netip.IPv4Unspecified(), Port: n}},
				Origins: []port.OriginInfo{{Origin: port.Origin{Source: "socket"}}, {Origin: port.Origin{Source: source}}},
			}
			want := source != "socket" && source != "nat"
			if d := Empty(Loopback()).Decide(p); d.Allow != want {
				t.Errorf("%d/udp of %s: %+v, want allowed: %v", n, source, d, want)
			}
		}
	}
}

func TestEnginesOwnPortsAreDeniedUnlessNamed(t *testing.T) {
	process := func(name string) port.Owner { return port.Owner{Kind: port.OwnerProcess, Name: name} }
	pod := func(namespace, name string) port.Owner {
		return port.Owner{Kind: port.OwnerContainer, Namespace: namespace, Name: name}
	}
	for _, c := range []struct {
		owner  port.Owner
		proto  port.Protocol
		at     string
		source string
		denied bool
	}{
		{process("etcd"), port.TCP, "127.0.0.1:2379", "socket", true},
		{process("etcd"), port.TCP, "0.0.0.0:2380", "socket", true},
		{process("nginx"), port.TCP, "0.0.0.0:2379", "socket", false},
		{pod("kube-system", "etcd-node/etcd"), port.TCP, "127.0.0.1:2379", "socket", true},
		{pod("shop", "etcd-0/etcd"), port.TCP, "127.0.0.1:2379", "socket", false},
		{process("etcd"), port.TCP, "0.0.0.0:2379", "docker", false}, // docker run -p 2379:2379
		{process("kube-proxy"), port.TCP, "127.0.0.1:10249", "socket", true},
		{process("kube-proxy"), port.TCP, "0.0.0.0:30080", "socket", false},
		{process("kubelet"), port.TCP, "[::]:10250", "socket", true},
		{process("k3s-server"), port.TCP, "[::]:10250", "socket", true},
		{process("k3s-server"), port.TCP, "[::]:6443", "socket", false},
		{process("kube-apiserver"), port.TCP, "[::]:6443", "socket", false},
		{process("containerd"), port.TCP, "127.0.0.1:43427", "socket", true},
		{process("dockerd"), port.TCP, "127.0.0.1:43427", "socket", true},
		{process("dockerd"), port.TCP, "[::]:2377", "socket", true},
		{process("dockerd"), port.UDP, "[::]:7946", "socket", true},
		{process("dockerd"), port.TCP, "0.0.0.0:2375", "socket", false},
		{process("dockerd"), port.TCP, "0.0.0.0:8080", "socket", false},
		{port.Owner{}, port.UDP, "0.0.0.0:4789", "socket", true},
		{port.Owner{}, port.TCP, "0.0.0.0:4789", "socket", false},
	} {
		at := netip.MustParseAddrPort(c.at)
		p := port.Publication{
			Fact:    port.Fact{Key: port.Key{Protocol: c.proto, Address: at.Addr(), Port: at.Port()}, Owner: c.owner},
			Origins: []port.OriginInfo{{Origin: port.Origin{Source: c.source}}},
		}
		d := Empty(Loopback()).Decide(p)
		if d.Allow == c.denied || c.denied && (d.Rule.Kind != port.RuleEngine || d.Withheld()) {
			t.Errorf("%s of %q: %+v, want denied: %v", p.Key, c.owner.Name, d, c.denied)
		}
		if steps := Empty(Loopback()).Explain(p); c.denied && (!steps[0].Decides || steps[0].Rule != d.Rule.String()) {
			t.Errorf("%s of %q: steps %+v", p.Key, c.owner.Name, steps)
		}
		set, err := New(Loopback(), []Rule{{Match: Match{Ports: []PortRange{{at.Port(), at.Port()}}}}})
		if err != nil {
			t.Fatal(err)
		}
		if d := set.Decide(p); !d.Allow {
			t.Errorf("%s of %q with a rule that names it: %+v", p.Key, c.owner.Name, d)
		}
	}
}

// A port that may be an engine's own waits until its owner is known.
func TestEnginesOwnPortsWaitForTheOwner(t *testing.T) {
	allowAll := []Rule{{}}
	for _, c := range []struct {
		owner     port.Owner
		at        string
		source    string
		contained bool
		rules     []Rule
		pending   bool
	}{
		{port.Owner{}, "0.0.0.0:2379", "socket", false, nil, true},
		{port.Owner{}, "127.0.0.1:40000", "socket", false, nil, true},
		{port.Owner{}, "127.0.0.1:40000", "socket", false, allowAll, true},
		{port.Owner{}, "0.0.0.0:40000", "socket", false, nil, false},
		{port.Owner{}, "0.0.0.0:8080", "socket", false, nil, false},
		{port.Owner{}, "0.0.0.0:2379", "nat", false, nil, true}, // a pod of kube-system
		{port.Owner{}, "127.0.0.1:40000", "nat", false, nil, false},
		{port.Owner{}, "0.0.0.0:2379", "docker", false, nil, false}, // declared
		{port.Owner{Kind: port.OwnerProcess, Name: "etcd"}, "0.0.0.0:2379", "socket", true, nil, true},
		{port.Owner{Kind: port.OwnerProcess, Name: "nginx"}, "127.0.0.1:40000", "socket", true, nil, false},
		{port.Owner{}, "0.0.0.0:2379", "socket", false, []Rule{{Match: Match{Ports: []PortRange{{2379, 2379}}}}}, false},
		{port.Owner{}, "0.0.0.0:2379", "socket", false, []Rule{{Deny: true}}, false},
	} {
		at := netip.MustParseAddrPort(c.at)
		p := port.Publication{
			Fact:      port.Fact{Key: port.Key{Protocol: port.TCP, Address: at.Addr(), Port: at.Port()}, Owner: c.owner, OwnerPending: true},
			Contained: c.contained,
			Origins:   []port.OriginInfo{{Origin: port.Origin{Source: c.source}}},
		}
		set, err := New(Loopback(), c.rules)
		if err != nil {
			t.Fatal(err)
		}
		d := set.Decide(p)
		if d.Pending() != c.pending || c.pending && (d.Rule.Kind != port.RuleEngine || d.Allow) {
			t.Errorf("%s of %+v by %s: %+v, want pending: %v", p.Key, c.owner, c.source, d, c.pending)
		}
		if p.OwnerPending = false; set.Decide(p).Pending() {
			t.Errorf("%s: pending though the owner is known", p.Key)
		}
	}
}

// A user's own program that has an engine's name is published.
func TestEnginesNamesAreNotPrefixes(t *testing.T) {
	for _, c := range []struct {
		name      string
		at        string
		proto     port.Protocol
		contained bool
		denied    bool
	}{
		{"etcd", "0.0.0.0:2379", port.TCP, false, true},
		{"etcd", "0.0.0.0:2379", port.TCP, true, false},
		{"etcd-proxy", "0.0.0.0:2379", port.TCP, false, false},
		{"containerd", "127.0.0.1:40000", port.TCP, false, true},
		{"containerd", "0.0.0.0:8080", port.TCP, false, false},
		{"containerd-shim", "127.0.0.1:40000", port.TCP, false, false},
		{"k3s-agent", "127.0.0.1:10250", port.TCP, false, true},
		{"k3sup", "127.0.0.1:10250", port.TCP, false, false},
		{"", "0.0.0.0:8472", port.UDP, false, true},
		{"", "0.0.0.0:8472", port.UDP, true, false},
		{"game", "0.0.0.0:8472", port.UDP, false, false},
	} {
		at := netip.MustParseAddrPort(c.at)
		p := port.Publication{
			Fact:      port.Fact{Key: port.Key{Protocol: c.proto, Address: at.Addr(), Port: at.Port()}},
			Contained: c.contained,
			Origins:   []port.OriginInfo{{Origin: port.Origin{Source: "socket"}}},
		}
		if c.name != "" {
			p.Owner = port.Owner{Kind: port.OwnerProcess, Name: c.name}
		}
		if d := Empty(Loopback()).Decide(p); d.Allow == c.denied {
			t.Errorf("%s of %q, in a container %v: %+v, want denied: %v", p.Key, c.name, c.contained, d, c.denied)
		}
	}
}

// Other owners than the one that is shown count as well.
func TestOtherOwners(t *testing.T) {
	web := port.Owner{Kind: port.OwnerContainer, ID: "a", Name: "web"}
	secret := port.Owner{Kind: port.OwnerContainer, ID: "b", Name: "secret0", Labels: map[string]string{"zone": "internal"}}
	service := port.Owner{Kind: port.OwnerService, ID: "shop/web", Name: "web", Namespace: "shop"}
	deny := func(m Match) []Rule { return []Rule{{Match: m, Deny: true}} }
	name, label := Match{Name: "secret*"}, Match{Labels: map[string]string{"zone": "internal"}}
	kind := Match{Owners: []port.OwnerKind{port.OwnerContainer}}
	process, only := port.Owner{Kind: port.OwnerProcess, ID: "7", Name: "nginx"}, func(m Match) []Rule { return []Rule{{Match: m}, {Deny: true}} }
	processes, services := Match{Owners: []port.OwnerKind{port.OwnerProcess}}, Match{Owners: []port.OwnerKind{port.OwnerService}}
	sshd, held := port.Owner{Kind: port.OwnerProcess, Name: "sshd"}, port.Owner{Kind: port.OwnerContainer, ID: "h", Name: "web", Held: &port.Held{Process: "pasta"}}
	for _, c := range []struct {
		what  string
		owner port.Owner
		other port.OtherOwner
		rules []Rule
		want  string
	}{
		{"no rule", web, port.OtherOwner{Owner: secret, Rival: true}, nil, "allow"},
		{"a rival is denied", web, port.OtherOwner{Owner: secret, Rival: true}, deny(name), "pending"},
		{"a rival is denied by label", web, port.OtherOwner{Owner: secret, Rival: true}, deny(label), "pending"},
		{"a rival is allowed", secret, port.OtherOwner{Owner: web, Rival: true}, deny(name), "pending"},
		{"both are denied", web, port.OtherOwner{Owner: secret, Rival: true}, deny(kind), "deny"},
		{"a target is denied", web, port.OtherOwner{Owner: secret}, deny(name), "deny"},
		{"a target is allowed", secret, port.OtherOwner{Owner: web}, deny(name), "deny"},
		{"a Service's pod is denied", service, port.OtherOwner{Owner: secret}, deny(label), "deny"},
		{"a target is of a kind that is denied", port.Owner{}, port.OtherOwner{Owner: secret}, deny(kind), "deny"},
		{"a process's target is of a kind that is denied", process, port.OtherOwner{Owner: secret}, deny(kind), "deny"},
		{"a process's target is of no kind that is allowed", process, port.OtherOwner{Owner: secret}, only(processes), "deny"},
		{"a container's target is not the one that is allowed", web, port.OtherOwner{Owner: secret}, only(Match{Name: "web"}), "deny"},
		{"a Service's pods are of no kind that is allowed", service, port.OtherOwner{Owner: secret}, only(services), "allow"},
		{"a Service's pod is of a kind that is denied", service, port.OtherOwner{Owner: secret}, deny(kind), "allow"},
		{"a process beside is denied", process, port.OtherOwner{Owner: sshd}, deny(Match{Name: "sshd"}), "deny"},
		{"a process beside is not allowed", process, port.OtherOwner{Owner: sshd}, only(Match{Name: "nginx"}), "deny"},
		{"a process beside a container is denied", web, port.OtherOwner{Owner: sshd}, deny(Match{Name: "sshd"}), "deny"},
		{"a process beside a container is of no kind that is allowed", web, port.OtherOwner{Owner: sshd}, only(kind), "deny"},
		{"a process that is not known is beside one that is allowed", process, port.OtherOwner{}, only(Match{Name: "nginx"}), "deny"},
		{"a process that is not known is beside one", process, port.OtherOwner{}, deny(Match{Name: "sshd"}), "allow"},
		{"a user's container of a name that is allowed is beside", web, port.OtherOwner{Owner: held}, only(Match{Name: "web"}), "deny"},
		{"a user's container is beside, whose process is denied", web, port.OtherOwner{Owner: held}, deny(Match{Name: "pasta"}), "deny"},
		{"a user's container is beside, of a name that is denied", process, port.OtherOwner{Owner: held}, deny(Match{Name: "web"}), "deny"},
		{"a process is beside a user's container", held, port.OtherOwner{Owner: sshd}, only(Match{Name: "pasta"}), "deny"},
		{"a target has another host port", web, port.OtherOwner{Owner: secret}, []Rule{{Match: name, HostAddress: All()}}, "allow"},
		{"a rival has another host address", web, port.OtherOwner{Owner: secret, Rival: true}, []Rule{{Match: name, HostAddress: All()}}, "pending"},
	} {
		set, err := New(Loopback(), c.rules)
		if err != nil {
			t.Fatal(err)
		}
		p := port.Publication{
			Fact:    port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8200}, Owner: c.owner, Others: []port.OtherOwner{c.other}},
			Origins: []port.OriginInfo{{Origin: port.Origin{Source: "docker"}}},
		}
		d := set.Decide(p)
		got := "deny"
		switch {
		case d.Pending():
			got = "pending"
		case d.Allow:
			got = "allow"
		}
		if got != c.want {
			t.Errorf("%s: %+v, want %s", c.what, d, c.want)
		}
		decides := 0
		for _, s := range set.Explain(p) {
			if s.Decides {
				decides++
				if !d.Allow && s.Why != "deny" && s.Why != d.Reason.String() {
					t.Errorf("%s: the step that decides is %+v, the reason %q", c.what, s, d.Reason.String())
				}
			}
		}
		if decides != 1 {
			t.Errorf("%s: %d steps decide", c.what, decides)
		}
	}
}

func TestHostRuleThatNamesAnOwnerWaitsForIt(t *testing.T) {
	secret := Match{Name: "secret*"}
	for _, c := range []struct {
		name  string
		rules []Rule
		want  string
	}{
		{"no rules", nil, "allow"},
		{"deny by name", []Rule{{Match: secret, Deny: true}}, "pending"},
		{"deny by name of another port", []Rule{{Match: Match{Name: "secret*", Ports: []PortRange{{1, 2}}}, Deny: true}}, "allow"},
		{"allow by name, as by default", []Rule{{Match: secret}}, "allow"},
		{"allow by name, elsewhere", []Rule{{Match: secret, HostAddress: All()}}, "pending"},
		{"deny the port anyway", []Rule{{Match: secret, Deny: true}, {Deny: true}}, "deny"},
	} {
		set, err := New(Loopback(), c.rules)
		if err != nil {
			t.Fatal(err)
		}
		p := port.Publication{
			Fact: port.Fact{
				Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8200}, OwnerPending: true,
				Decision: port.Decision{Allow: true, Host: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8200")}},
			},
		}
		d := set.Host("vm", p, p.Decision.Host)
		got := "deny"
		switch {
		case d.Pending():
			got = "pending"
		case d.Allow:
			got = "allow"
		}
		if got != c.want || d.Pending() && (d.Allow || len(d.Host) > 0 || d.Reason.String() != notKnownYet()) {
			t.Errorf("%s: %+v, want %s", c.name, d, c.want)
		}
		if p.OwnerPending = false; set.Host("vm", p, p.Decision.Host).Pending() {
			t.Errorf("%s: pending though the owner is known", c.name)
		}
	}
}

// The host's rules look at the owners to whom NAT rules lead as the agent's do.
func TestHostRuleDeniesTargetOwner(t *testing.T) {
	web := port.Owner{Kind: port.OwnerContainer, ID: "w", Name: "web"}
	secret := port.Owner{Kind: port.OwnerContainer, ID: "s", Name: "secret0"}
	service := port.Owner{Kind: port.OwnerService, ID: "shop/front", Name: "front", Namespace: "shop"}
	name, kind := Match{Name: "secret*"}, Match{Owners: []port.OwnerKind{port.OwnerContainer}}
	for _, c := range []struct {
		what  string
		owner port.Owner
		rules []Rule
		allow bool
	}{
		{"no rules", web, nil, true},
		{"a target is denied by name", web, []Rule{{Match: name, Deny: true}}, false},
		{"a Service's pod is denied by name", service, []Rule{{Match: name, Deny: true}}, false},
		{"a Service's pod is of a kind that is denied", service, []Rule{{Match: kind, Deny: true}}, true},
		{"a target is of a kind that is denied", port.Owner{}, []Rule{{Match: kind, Deny: true}}, false},
		{"a target has another host address", web, []Rule{{Match: name, HostAddress: All()}}, true},
		{"a process beside is denied", web, []Rule{{Match: Match{Name: "sshd"}, Deny: true}}, false},
		{"a process beside is not allowed", port.Owner{Kind: port.OwnerProcess, Name: "nginx"}, []Rule{{Match: Match{Name: "nginx"}}, {Match: name}, {Deny: true}}, false},
	} {
		set, err := New(Loopback(), c.rules)
		if err != nil {
			t.Fatal(err)
		}
		asked := netip.MustParseAddrPort("127.0.0.1:8200")
		p := port.Publication{
			Fact: port.Fact{
				Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8200}, Owner: c.owner,
				Others: []port.OtherOwner{{Owner: secret}, {Owner: port.Owner{Kind: port.OwnerProcess, Name: "sshd"}}}, Decision: port.Decision{Allow: true, Host: []netip.AddrPort{asked}},
			},
		}
		d := set.Host("vm", p, p.Decision.Host)
		if d.Allow != c.allow || d.Pending() || c.allow && !slices.Equal(d.Host, []netip.AddrPort{asked}) {
			t.Errorf("%s: %+v, want allow %v", c.what, d, c.allow)
		}
	}
}

// A rule of the host that may match by what the guest left out of the owner fails closed.
func TestHostRuleThatMayMatchWhatWasLeftOut(t *testing.T) {
	label := Match{Labels: map[string]string{"zone": "internal"}}
	both := Match{Labels: map[string]string{"zone": "internal", "tier": "db"}}
	deny := func(m Match) []Rule { return []Rule{{Match: m, Deny: true}} }
	name := func(s string) Match { return Match{Name: s} }
	trimmed := port.Owner{Kind: port.OwnerContainer, ID: "w", Name: "web", Labels: map[string]string{"tier": "front"}, LabelsOmitted: true}
	cut := port.Owner{Kind: port.OwnerContainer, ID: "w", Name: "web", Namespace: "shop", NameCut: true}
	named := trimmed
	named.LabelsLeftOut = &[]string{"devcontainer.metadata", "team"}
	const labels, names = "labels of its owner were left out", "parts of its owner's name were left out"
	for _, c := range []struct {
		what   string
		owner  port.Owner
		rules  []Rule
		reason string // that it is denied for, empty if it is allowed
	}{
		{"no rules", trimmed, nil, ""},
		{"deny by a label that may be there", trimmed, deny(label), labels},
		{"deny by a label that has another value", trimmed, deny(both), ""},
		{"deny by a label that was not left out", named, deny(label), ""},
		{"deny by a label that was left out", named, deny(Match{Labels: map[string]string{"team": "x"}}), labels},
		{"deny by labels of which one was not left out", named, deny(Match{Labels: map[string]string{"team": "x", "zone": "internal"}}), ""},
		{"allow by a label that was not left out what is denied", named, []Rule{{Match: label}, {Match: Match{Labels: map[string]string{"tier": "back"}}, Deny: true}}, ""},
		{"deny by a label that is there", trimmed, deny(Match{Labels: map[string]string{"tier": "f*"}}), "denied by host rule 1"},
		{"deny by name", trimmed, deny(name("db")), ""},
		{"deny by another name and label", trimmed, deny(Match{Name: "db", Labels: label.Labels}), ""},
		{"deny another port by label", trimmed, deny(Match{Ports: []PortRange{{1, 2}}, Labels: label.Labels}), ""},
		{"deny processes by label", trimmed, deny(Match{Owners: []port.OwnerKind{port.OwnerProcess}, Labels: label.Labels}), ""},
		{"allow by label what is allowed", trimmed, []Rule{{Match: label}}, ""},
		{"allow by label at other addresses", trimmed, []Rule{{Match: label, HostAddress: All()}}, labels},
		{"allow by label what is denied", trimmed, []Rule{{Match: label}, {Deny: true}}, labels},
		{"allow by name before", trimmed, []Rule{{Match: name("web")}, deny(label)[0]}, ""},
		{"all labels are there", port.Owner{Kind: port.OwnerContainer, Name: "web"}, deny(label), ""},
		{"deny by a name that was cut", cut, deny(name("web-2")), names},
		{"deny by a name that begins so", cut, deny(name("web*")), names},
		{"deny by a namespace that was cut", cut, deny(Match{Namespace: "shopping"}), names},
		{"deny by label where a name was cut", cut, deny(label), ""},
		{"deny by a name that was cut and a label that is not there", cut, deny(Match{Name: "web-2", Labels: label.Labels}), ""},
	} {
		for _, where := range []string{"configuration", "run time"} {
			set, err := New(Loopback(), c.rules)
			if where == "run time" && c.what != "allow by label at other addresses" {
				if set, err = New(Loopback(), nil); err == nil {
					set, err = set.WithRuntime(asRequested(c.rules))
				}
			}
			if err != nil {
				t.Fatal(err)
			}
			asked := netip.MustParseAddrPort("127.0.0.1:8200")
			p := port.Publication{
				Fact: port.Fact{
					Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8200}, Owner: c.owner,
					Decision: port.Decision{Allow: true, Host: []netip.AddrPort{asked}},
				},
			}
			d := set.Host("vm", p, p.Decision.Host)
			if d.Allow != (c.reason == "") || d.Pending() || !strings.Contains(strings.NewReplacer("host runtime rule", "host rule", " (deny)", "", " (forward)", "").Replace(d.Reason.String()), c.reason) {
				t.Errorf("%s, rules of the %s: %+v, want reason %q", c.what, where, d, c.reason)
			}
			// The same owner behind a NAT rule.
			p.Owner, p.Others = port.Owner{}, []port.OtherOwner{{Owner: c.owner}}
			if d = set.Host("vm", p, p.Decision.Host); len(c.rules) == 1 && c.rules[0].Deny && (d.Allow != (c.reason == "") || d.Pending()) {
				t.Errorf("%s behind a NAT rule, rules of the %s: %+v", c.what, where, d)
			}
		}
	}
}

// The sources of several clusters are one to rules, and what each declares is asked for.
func TestSourcesOfOneFamily(t *testing.T) {
	set, err := New(Loopback(), []Rule{{Match: Match{Sources: []string{"kube"}, Ports: []PortRange{{30080, 30080}}}, Deny: true}})
	if err != nil {
		t.Fatal(err)
	}
	for _, source := range []string{"kube", "kube:k3s", "kube:/a:b"} {
		p := port.Publication{
			Fact:    port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 30080}},
			Origins: []port.OriginInfo{{Origin: port.Origin{Source: source}}},
		}
		if d := set.Decide(p); d.Allow || !strings.HasPrefix(d.Rule.String(), "rule 1") {
			t.Errorf("%s: decided %+v, want a denial by rule 1", source, d)
		}
		p.Protocol, p.Port = port.UDP, 53
		if d := set.Decide(p); !d.Allow {
			t.Errorf("%s declares 53/udp: decided %+v, want it allowed", source, d)
		}
	}
}
