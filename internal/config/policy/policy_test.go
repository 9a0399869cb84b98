// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config/yamltree"
	"github.com/fairlead/fairlead/internal/port"
)

func parse(t *testing.T, text string) (Policy, error) {
	t.Helper()
	n, err := yamltree.Parse("a.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	var p Policy
	err = new(yamltree.Decoder).Decode(n, &p, `entries ("- match: {name: web}")`)
	return p, err
}

func TestPolicy(t *testing.T) {
	p, err := parse(t, `
- match: {name: "web*"}
  guestPorts: [5432, 8000-8001]
- match: {namespace: shop, labels: {role: "front*"}}
  hostPorts: 80, 3000-3001
`)
	if err != nil {
		t.Fatal(err)
	}
	web := port.Owner{Kind: port.OwnerContainer, Name: "web-1"}
	front := port.Owner{Kind: port.OwnerContainer, Name: "x", Namespace: "shop", Labels: map[string]string{"role": "frontend"}}
	back := port.Owner{Kind: port.OwnerContainer, Name: "y", Namespace: "shop", Labels: map[string]string{"role": "back"}}
	for _, c := range []struct {
		of                 port.Owner
		number             uint16
		named, guest, host bool
	}{
		{web, 5432, true, true, false},
		{web, 8001, true, true, false},
		{web, 8002, true, false, false},
		{web, 80, true, false, false},
		{front, 80, true, false, true},
		{front, 3001, true, false, true},
		{front, 5432, true, false, false},
		{back, 80, false, false, false},
		{port.Owner{}, 80, false, false, false},
	} {
		if p.Names(c.of) != c.named || p.Guest(c.of, c.number) != c.guest || p.Host(c.of, c.number) != c.host {
			t.Errorf("%+v, port %d: named %v, guest %v, host %v", c.of, c.number, p.Names(c.of), p.Guest(c.of, c.number), p.Host(c.of, c.number))
		}
	}
	if none := (Policy)(nil); none.Names(web) || none.Guest(web, 5432) || none.Host(front, 80) {
		t.Error("an empty policy allows something")
	}
}

func TestParseErrors(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"{match: {name: web}, guestPorts: 80}", "want a list"},
		{"- guestPorts: 80", "no container is named"},
		{"- {match: {labels: {}}, guestPorts: 80}", "no container is named"},
		{"- {match: {name: ''}, guestPorts: 80}", "want a text that is not empty"},
		{"- match: {name: web}", "no port is allowed"},
		{"- {match: {name: web}, guestPorts: []}", "an empty list"},
		{"- {match: {name: web}, hostPorts: 90-80}", "ends before it begins"},
		{"- {match: {name: web, ports: 80}, hostPorts: 80}", `unknown key "ports"`},
		{"- {match: {name: web}, hostport: 80}", `unknown key "hostport"`},
	} {
		if p, err := parse(t, c.text); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v; want %q", c.text, p, err, c.want)
		}
	}
	if p, err := parse(t, ""); err != nil || len(p) != 0 {
		t.Errorf("no entries: %v, %v", p, err)
	}
}
