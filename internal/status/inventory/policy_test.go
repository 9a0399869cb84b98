// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

const policyText = `
policies:
  - nodes: {labels: {role: "edge*"}}
    rules:
      - {name: web, match: {ports: [80, 443], owner: container, namespace: "ingress-*"}, action: allow}
  - nodes: {name: bastion}
    rules:
      - {match: {ports: 22}, action: allow}
rules:
  - {name: no-debug, match: {ports: 9229}, action: deny}
  - {match: {name: sshd, owner: process, address: 10.0.0.0/8}, action: allow}
  - {match: {owner: process, ports: 9000-9999}, action: allow}
`

func TestAudit(t *testing.T) {
	policy, err := ParsePolicy("policy.yaml", []byte(policyText))
	if err != nil {
		t.Fatal(err)
	}
	pod := func(number int, namespace string) Port {
		p := tcp("0.0.0.0", number, "nginx")
		p.Owner = Owner{Kind: port.OwnerContainer, Name: "nginx", Namespace: namespace}
		return p
	}
	withheld := tcp("0.0.0.0", 7, "bound")
	withheld.Withheld = true
	ready := []Condition{{Type: ConditionReady, True: true}}
	audited := func(node string, ports ...Port) NodeInventory {
		return objectOf(t, node, Report{Ports: ports, Conditions: ready})
	}
	stale := audited("stale")
	stale.Status.Holder.Renewed.Time = noon.Add(-time.Hour)
	ahead := audited("ahead")
	ahead.Status.Holder.Renewed.Time = noon.Add(time.Hour)
	cut := audited("cut", tcp("0.0.0.0", 9000, "x"))
	cut.Status.Ports.Wide = 12_000
	objects := []NodeInventory{
		audited("edge", pod(80, "ingress-nginx"), pod(443, "shop"), tcp("0.0.0.0", 9229, "node"), tcp("0.0.0.0", 9100, "exporter")),
		audited("inner", pod(80, "ingress-nginx"), tcp("10.1.2.3", 22, "sshd"), tcp("127.0.0.1", 5432, "db"), withheld),
		audited("bastion", tcp("0.0.0.0", 22, "sshd")),
		audited("gone", tcp("0.0.0.0", 1, "x")), // no such node any more
		stale, ahead, cut,
		objectOf(t, "starting", Report{Conditions: []Condition{{Type: ConditionReady, Message: "source nat is starting"}}}),
		objectOf(t, "unconditional", Report{}),
	}
	nodes := map[string]map[string]string{
		"edge": {"role": "edge-1"}, "inner": {"role": "inner"}, "bastion": nil, "silent": nil, "stale": nil, "ahead": nil, "cut": nil,
		"starting": nil, "unconditional": nil,
	}
	a := policy.Audit(nodes, objects, noon)
	var got []string
	for _, v := range a.Violations {
		got = append(got, fmt.Sprintf("%s %v: %s", v.Node, v.Key, v.Reason))
	}
	want := []string{
		"edge tcp 0.0.0.0:443: no rule allows it", "edge tcp 0.0.0.0:9229: denied by rule 1 (no-debug)", "inner tcp 0.0.0.0:80: no rule allows it",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("violations:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	failed := map[string]string{
		"silent": "no inventory", "stale": "last written 60m ago", "ahead": "its clock is 60m ahead", "cut": "12000 ports",
		"starting": "its list may lack ports", "unconditional": "its list may lack ports",
	}
	for _, n := range a.Nodes {
		if w := failed[n.Name]; w == "" && n.Error != "" || !strings.HasPrefix(n.Error, w) {
			t.Errorf("node %s: error %q, want %q", n.Name, n.Error, w)
		}
	}
	for name := range failed {
		if a := policy.Audit(map[string]map[string]string{name: nil}, objects, noon); a.Passed() {
			t.Errorf("node %s passed: %+v", name, a)
		}
	}
	if len(a.Nodes) != len(nodes) || a.Passed() {
		t.Errorf("%d nodes, passed %v", len(a.Nodes), a.Passed())
	}
	if a := policy.Audit(map[string]map[string]string{"bastion": nil}, objects, noon); !a.Passed() {
		t.Errorf("a node that complies: %+v", a)
	}
}

// A rule that denies an owner holds for a port whose owner is not known, whatever a later
// rule allows.
func TestAuditOfUnknownOwner(t *testing.T) {
	policy, err := ParsePolicy("policy.yaml", []byte(`
rules:
  - {match: {ports: 8000-8999, name: "debug*"}, action: deny}
  - {match: {ports: 8000-9999}, action: allow}
`))
	if err != nil {
		t.Fatal(err)
	}
	unknown := func(number int) Port {
		p := tcp("0.0.0.0", number, "")
		p.Owner = Owner{}
		return p
	}
	o := objectOf(t, "n", Report{
		Ports:      []Port{unknown(8080), unknown(9090), tcp("0.0.0.0", 8081, "web"), tcp("0.0.0.0", 8082, "debugger")},
		Conditions: []Condition{{Type: ConditionReady, True: true}},
	})
	var got []string
	for _, v := range policy.Audit(map[string]map[string]string{"n": nil}, []NodeInventory{o}, noon).Violations {
		got = append(got, fmt.Sprintf("%d: %s", v.Port, v.Reason))
	}
	want := []string{"8080: denied by rule 1; its owner is not known", "8082: denied by rule 1"}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("violations %q, want %q", got, want)
	}
}

// A policy that is for none of the nodes is named; one for all nodes, or for nodes without ports, is
// none.
func TestIdlePolicies(t *testing.T) {
	policy, err := ParsePolicy("policy.yaml", []byte(`
policies:
  - {nodes: {labels: {rol: edge}}, rules: []}
  - {nodes: {labels: {role: "ed?e"}}, rules: []}
  - {nodes: {name: "m*", labels: {role: edge}}, rules: []}
  - {nodes: {name: "n?"}, rules: []}
  - {rules: []}
rules: []
`))
	if err != nil {
		t.Fatal(err)
	}
	got := policy.Idle(map[string]map[string]string{"n1": {"role": "edge"}, "m": nil})
	if len(got) != 2 || !strings.HasPrefix(got[0], "policy 1 is for no node") || !strings.HasPrefix(got[1], "policy 3 is for no node") {
		t.Errorf("%q, want policies 1 and 3", got)
	}
}

func TestPolicyMistakes(t *testing.T) {
	for text, want := range map[string]string{
		"":                      "empty",
		"rule: []":              "rule",
		"policies: {}":          "list of policies",
		"rules: [{match: {}}]":  "no action",
		"policies: [{node: x}]": "node",
		"policies: [{nodes: {namespace: x}, rules: []}]":                   `unknown key "namespace": want name or labels`,
		"policies:\n- nodes: {name: 'n[1-4]'}\n  rules: []":                "policy.yaml:2:17: policies[0].nodes.name: \"n[1-4]\" matches no node",
		"policies: [{nodes: {labels: {a: b, c: 'x]'}}, rules: []}]":        "nodes.labels: \"x]\" matches no node",
		"rules: [{match: {labels: {a: b}}, action: allow}]":                "no labels of owners",
		"rules: [{match: {guest: a}, action: allow}]":                      "has nodes",
		"rules: [{action: allow, hostPort: 80, match: {ports: 8080}}]":     "opens nothing",
		"rules: [{action: allow}, {match: {labels: {a: b}}, action: deny}": "policy.yaml:1:",
	} {
		if _, err := ParsePolicy("policy.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "policy.yaml") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzParsePolicy(f *testing.F) {
	f.Add([]byte("policies:\n- nodes: {name: \"edge-*\", labels: {zone: a}}\n  rules:\n  - {ports: [22], deny: true}\nrules:\n- {owner: container}\n"))
	f.Add([]byte("policies: [{nodes: {namespace: x}}]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParsePolicy("policy", b)
		if err != nil && len(p.parts) > 0 {
			t.Errorf("%q: %v, and %d parts", b, err, len(p.parts))
		}
		pub := port.Publication{Fact: port.Fact{Key: port.Key{Port: 22}}}
		blind, sure := p.decide(subject{port.Owner{Name: "edge-1"}, true}, pub)
		for _, zone := range []string{"a", "b"} {
			why, known := p.decide(subject{node: port.Owner{Name: "edge-1", Labels: map[string]string{"zone": zone}}}, pub)
			if !known || sure && (why == "") != (blind == "") {
				t.Errorf("%q: in zone %s %q, without labels %q", b, zone, why, blind)
			}
		}
	})
}
