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
	stale := objectOf(t, "stale", Report{})
	stale.Status.Holder.Renewed.Time = noon.Add(-time.Hour)
	cut := objectOf(t, "cut", Report{Ports: []Port{tcp("0.0.0.0", 9000, "x")}})
	cut.Status.Ports.Wide = 12_000
	objects := []NodeInventory{
		objectOf(t, "edge", Report{Ports: []Port{pod(80, "ingress-nginx"), pod(443, "shop"), tcp("0.0.0.0", 9229, "node"), tcp("0.0.0.0", 9100, "exporter")}}),
		objectOf(t, "inner", Report{Ports: []Port{pod(80, "ingress-nginx"), tcp("10.1.2.3", 22, "sshd"), tcp("127.0.0.1", 5432, "db"), withheld}}),
		objectOf(t, "bastion", Report{Ports: []Port{tcp("0.0.0.0", 22, "sshd")}}),
		objectOf(t, "gone", Report{Ports: []Port{tcp("0.0.0.0", 1, "x")}}), // no such node any more
		stale, cut,
	}
	nodes := map[string]map[string]string{
		"edge": {"role": "edge-1"}, "inner": {"role": "inner"}, "bastion": nil, "silent": nil, "stale": nil, "cut": nil,
	}
	a := policy.Audit(nodes, objects, noon)
	var got []string
	for _, v := range a.Violations {
		got = append(got, fmt.Sprintf("%s %v: %s", v.Node, v.Key(), v.Reason))
	}
	want := []string{
		"edge tcp 0.0.0.0:443: no rule allows it", "edge tcp 0.0.0.0:9229: denied by rule 1 (no-debug)", "inner tcp 0.0.0.0:80: no rule allows it",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("violations:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	failed := map[string]string{"silent": "no inventory", "stale": "last written 60m ago", "cut": "12000 ports"}
	for _, n := range a.Nodes {
		if w := failed[n.Name]; w == "" && n.Error != "" || !strings.HasPrefix(n.Error, w) {
			t.Errorf("node %s: error %q, want %q", n.Name, n.Error, w)
		}
	}
	if len(a.Nodes) != len(nodes) || a.Passed() {
		t.Errorf("%d nodes, passed %v", len(a.Nodes), a.Passed())
	}
	if a := policy.Audit(map[string]map[string]string{"bastion": nil}, objects, noon); !a.Passed() {
		t.Errorf("a node that complies: %+v", a)
	}
	if a := policy.Audit(map[string]map[string]string{"silent": nil}, objects, noon); a.Passed() {
		t.Error("a node without an inventory passed")
	}
}

func TestPolicyMistakes(t *testing.T) {
	for text, want := range map[string]string{
		"":                      "empty",
		"rule: []":              "rule",
		"policies: {}":          "list of policies",
		"rules: [{match: {}}]":  "no action",
		"policies: [{node: x}]": "node",
		"policies: [{nodes: {namespace: x}, rules: []}]":                   "nodes have none",
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
