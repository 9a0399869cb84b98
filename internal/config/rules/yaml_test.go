// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config/yamltree"
)

func TestParseErrors(t *testing.T) {
	for _, tt := range []struct{ yaml, want string }{
		{"rulez: []", `r.yaml:1:1: unknown key "rulez" (did you mean "rules"?)`},
		{"expose: everywhere", `r.yaml:1:9: expose: "everywhere": want loopback or all`},
		{"expose: loopbck", `r.yaml:1:9: expose: "loopbck": want loopback or all (did you mean "loopback"?)`},
		{"expose: 10.0.0.1", `r.yaml:1:9: expose: "10.0.0.1": want loopback or all`},
		{"- action: allow", `r.yaml:1:1: a list: want a mapping (key: value)`},
		{"rules: allow", `r.yaml:1:8: rules: want a list of rules ("- action: allow")`},
		{"rules: [allow]", `r.yaml:1:9: rules[0]: "allow": want a mapping (key: value)`},
		{"rules:\n- name: x", `r.yaml:2:3: rules[0]: no action: want action: allow or action: deny`},
		{"rules:\n- action: alow", `r.yaml:2:11: rules[0].action: "alow": want allow or deny (did you mean "allow"?)`},
		{"rules:\n- action: allow\n- action:", `r.yaml:3:3: rules[1].action: no value: give one, or leave the key out`},
		{"rules:\n- action: deny\n  match:", `r.yaml:3:3: rules[0].match: no value: want a mapping (key: value)`},
		{"rules:\n- action: deny\n  match: {port: 80}", `r.yaml:3:11: rules[0].match: unknown key "port" (did you mean "ports"?)`},
		{"rules:\n- action: deny\n  match:\n    protocol: sctp", `r.yaml:4:15: rules[0].match.protocol: protocol "sctp": want tcp or udp`},
		{"rules:\n- action: deny\n  match:\n    ports: 80x", `r.yaml:4:12: rules[0].match.ports: "80x": want a port (8080) or a range (8000-8999), from 1 to 65535`},
		{"rules:\n- action: deny\n  match:\n    ports: [80, 0]", `r.yaml:4:17: rules[0].match.ports[1]: "0": want a port (8080) or a range (8000-8999), from 1 to 65535`},
		{"rules:\n- action: deny\n  match:\n    ports: 90-80", `r.yaml:4:12: rules[0].match.ports: "90-80": the range ends before it begins`},
		{"rules:\n- action: deny\n  match:\n    ports: []", `r.yaml:4:12: rules[0].match.ports: an empty list: want at least one, or leave the key out to match all`},
		{"rules:\n- action: deny\n  match:\n    ports:", `r.yaml:4:5: rules[0].match.ports: no value: give one, or leave the key out`},
		{"rules:\n- action: deny\n  match: {address: 10.0.0.5/8}", `r.yaml:3:20: rules[0].match.address: "10.0.0.5/8" has bits outside its prefix: want 10.0.0.0/8`},
		{"rules:\n- action: deny\n  match: {address: wildcrad}", `r.yaml:3:20: rules[0].match.address: "wildcrad": want an address, a CIDR prefix, wildcard or loopback (did you mean "wildcard"?)`},
		{"rules:\n- action: deny\n  match: {address: '::ffff:10.0.0.0/104'}", `r.yaml:3:20: rules[0].match.address: "::ffff:10.0.0.0/104": write an IPv4 prefix as such`},
		{"rules:\n- action: deny\n  match: {source: dokcer}", `r.yaml:3:19: rules[0].match.source: "dokcer": want socket, nat, docker, podman, containerd, kube, publish or demand (did you mean "docker"?)`},
		{"rules:\n- action: deny\n  match: {owner: pod}", `r.yaml:3:18: rules[0].match.owner: "pod": want container, service, process or unknown`},
		{"rules:\n- action: deny\n  match: {name: ''}", `r.yaml:3:17: rules[0].match.name: "": want a text that is not empty`},
		{"rules:\n- action: deny\n  match: {name: [a]}", `r.yaml:3:17: rules[0].match.name: a list: want one value`},
		{"rules:\n- action: deny\n  match: {name: *web}", `r.yaml:3:17: rules[0].match.name: an alias, which is not supported (quote a value that begins with "*"): want one value`},
		{"rules:\n- action: deny\n  match: {labels: web}", `r.yaml:3:19: rules[0].match.labels: "web": want a mapping (key: value)`},
		{"rules:\n- action: deny\n  match: {labels: {a: }}", `r.yaml:3:20: rules[0].match.labels.a: no value: give one, or leave the key out`},
		{"rules:\n- action: deny\n  hostPort: 80", `r.yaml:3:13: rules[0].hostPort: 80: only a rule with action allow has a host port`},
		{"rules:\n- action: allow\n  proxyProtocol: v1", `r.yaml:3:18: rules[0].proxyProtocol: "v1": want v2 (did you mean "v2"?)`},
		{"rules:\n- action: allow\n  proxyProtocol: v2", `r.yaml:3:18: rules[0].proxyProtocol: v2: it is spoken over TCP alone: want protocol: tcp in match`},
		{"rules:\n- match: {protocol: udp}\n  action: allow\n  proxyProtocol: v2", `r.yaml:4:18: rules[0].proxyProtocol: v2: it is spoken over TCP alone: want protocol: tcp in match`},
		{"rules:\n- match: {protocol: tcp}\n  action: deny\n  proxyProtocol: v2", `r.yaml:4:18: rules[0].proxyProtocol: v2: only a rule with action allow connects to a server`},
		{"rules:\n- action: deny\n  hostAddress: all", `r.yaml:3:16: rules[0].hostAddress: all: only a rule with action allow has a host address`},
		{"rules:\n- action: allow\n  hostAddress: al", `r.yaml:3:16: rules[0].hostAddress: "al": want loopback, all or an address of the host (did you mean "all"?)`},
		{"rules:\n- action: allow\n  hostPort: 65536", `r.yaml:3:13: rules[0].hostPort: "65536": want a port up to 65535, an offset such as "+1000", or 0 for any free port`},
		{"rules:\n- action: allow\n  hostPort: +70000", `r.yaml:3:13: rules[0].hostPort: "+70000": want a port up to 65535, an offset such as "+1000", or 0 for any free port`},
		{"rules:\n- action: allow\n  match: {ports: 80-81}\n  hostPort: 9090", `r.yaml:4:13: rules[0].hostPort: "9090": several guest ports cannot share one host port, want an offset such as "+1000"`},
		{"rules:\n- action: allow\n  match: {ports: 80-65000}\n  hostPort: +1000", `r.yaml:4:13: rules[0].hostPort: "+1000": port 65000 would become 66000, want 1 to 65535`},
		{"rules:\n- action: allow\n  action: deny", `r.yaml:3:3: mapping key "action" already defined at [2:3]`},
		{"expose: all\n---\nexpose: all", `r.yaml:3:1: a second document: want one`},
		{"rules: [", `r.yaml:1:8: a list without its end: want "]"`},
	} {
		_, err := Parse("r.yaml", []byte(tt.yaml))
		if err == nil || err.Error() != tt.want {
			t.Errorf("%q:\n got %v\nwant %s", tt.yaml, err, tt.want)
			continue
		}
		if _, ok := errors.AsType[*yamltree.Error](err); !ok {
			t.Errorf("%q: a %T, want a *yamltree.Error", tt.yaml, err)
		}
		if strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: more than one line: %q", tt.yaml, err)
		}
	}
}

// Each mistake of a rule is reported.
func TestParseReportsAllMistakes(t *testing.T) {
	_, err := Parse("r.yaml", []byte("rules:\n- acton: deny\n  match: {ports: 0, owner: pod}\n  hostPort: x\n- {}\n"))
	want := `r.yaml:2:3: rules[0]: unknown key "acton" (did you mean "action"?)
r.yaml:3:18: rules[0].match.ports: "0": want a port (8080) or a range (8000-8999), from 1 to 65535
r.yaml:3:28: rules[0].match.owner: "pod": want container, service, process or unknown
r.yaml:4:13: rules[0].hostPort: "x": want a port up to 65535, an offset such as "+1000", or 0 for any free port
r.yaml:5:3: rules[1]: no action: want action: allow or action: deny`
	if err == nil || err.Error() != want {
		t.Errorf("got %v\nwant %s", err, want)
	}
}

// The sources that a rule may name are those that there are.
func TestSourcesOfMatches(t *testing.T) {
	field, _ := reflect.TypeFor[Match]().FieldByName("Sources")
	if got := field.Tag.Get("words"); got != strings.Join(Sources(), ",") {
		t.Errorf("%s, want %s", got, Sources())
	}
}

func TestParseEmpty(t *testing.T) {
	for _, yaml := range []string{"", "# nothing\n", "---\n", "rules:\n", "rules: []", "{}"} {
		f, err := Parse("r.yaml", []byte(yaml))
		if err != nil || len(f.Rules) != 0 || f.Expose != Asked() {
			t.Errorf("%q: %+v, %v", yaml, f, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("expose: all\nrules:\n- name: x\n  match: {ports: [80, 90-99], labels: {a: '*'}, address: 10.0.0.0/8}\n  action: allow\n  hostPort: +1000\n")
	f.Add("rules: [{action: deny, match: {owner: container, source: [nat], name: 'a*'}}]")
	f.Add("rules:\n- action: allow\n  hostAddress: ::1\n")
	f.Add("a: &x [*x]")
	f.Add("? [a\n: |\n b")
	p := benchPub(f)
	f.Fuzz(func(t *testing.T, yaml string) {
		if len(yaml) > 4096 {
			return
		}
		file, err := Parse("r.yaml", []byte(yaml))
		if err != nil {
			if _, ok := errors.AsType[*yamltree.Error](err); !ok {
				t.Fatalf("a %T: %q", err, err)
			}
			for line := range strings.Lines(err.Error()) {
				if !strings.HasPrefix(line, "r.yaml:") {
					t.Fatalf("a line without its place: %q", err)
				}
			}
			return
		}
		s, err := New(file.Expose, file.Rules)
		if err != nil {
			t.Fatalf("parsed, but refused: %v", err)
		}
		decided := 0
		for _, step := range s.Explain(p) {
			if step.Decides {
				decided++
				if got := s.Decide(p).Rule.String(); got != step.Rule {
					t.Fatalf("decided by %s, explained by %s", got, step.Rule)
				}
			}
		}
		if decided != 1 {
			t.Fatalf("%d steps decide", decided)
		}
	})
}

func FuzzParsePorts(f *testing.F) {
	for _, s := range []string{"80", "1-65535", "80, 90-99", "0", "-", "+1", "9-8", "65536", "١"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		ranges, err := ParsePorts(s)
		if err != nil {
			return
		}
		if len(ranges) == 0 {
			t.Fatal("no ports, which would match all")
		}
		for _, r := range ranges {
			again, err := ParsePorts(r.String())
			if r.First == 0 || r.Last < r.First || err != nil || len(again) != 1 || again[0] != r {
				t.Fatalf("%q: %v, read again as %v, %v", s, r, again, err)
			}
		}
	})
}
