// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/yamltree"
)

func TestProgramsOfTheHost(t *testing.T) {
	n, err := yamltree.Parse("h.yaml", []byte("- {name: open, guests: [dev, 'ci-*'], path: /usr/bin/open, "+sum+`, args: ["https://[a-z.]+"]}`))
	if err != nil {
		t.Fatal(err)
	}
	p, err := ParseHost(n)
	if err != nil {
		t.Fatal(err)
	}
	e := p.Find("open")
	for guest, want := range map[string]bool{"dev": true, "ci-1": true, "devel": false, "": false, "x-ci-1": false, "Dev": false} {
		if e.HasGuest(guest) != want {
			t.Errorf("guest %q: %v", guest, !want)
		}
	}
	for arg, want := range map[string]bool{"https://a.b": true, "https://a.b\n": false, "https://a.b\x00": false, "x": false} {
		if err := e.Allows([]string{arg}, nil); (err == nil) != want {
			t.Errorf("%q: %v", arg, err)
		}
	}
	// A list of the guest is for none of the host's guests, and the other way round.
	if e.Matches(port.Owner{Kind: port.OwnerContainer, Name: "dev"}) || e.HasUser(0) || e.Directory != "/" {
		t.Errorf("%+v", e)
	}
	for text, want := range map[string]string{
		"- {name: a, path: /a, " + sum + "}":                                 "no guest may have it run",
		"- {name: a, guests: [], path: /a, " + sum + "}":                     "no guest may have it run",
		"- {name: a, guests: [''], path: /a, " + sum + "}":                   "want the name of a guest",
		"- {name: a, guests: ['*'], " + sum + "}":                            "no path",
		"- {name: a, guests: ['*'], path: /a}":                               "no sha256",
		"- {guests: ['*'], path: /a, " + sum + "}":                           "no name",
		"- {name: a, guests: ['*'], user: x, path: /a, " + sum + "}":         `unknown key "user"`,
		"- {name: a, guests: ['*'], match: {name: x}, path: /, " + sum + "}": `unknown key "match"`,
		"- {name: a, guests: ['*'], env: [DYLD_INSERT_LIBRARIES]}":           "dynamic linker",
	} {
		n, err := yamltree.Parse("h.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if p, err := ParseHost(n); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v", text, p, err)
		}
	}
}

func TestWhoMayAskTheHost(t *testing.T) {
	for text, want := range map[string]string{
		"- {name: open, match: {name: web}}":               "",
		"- {name: open, users: [7]}":                       "",
		"- {name: open}":                                   "nobody may ask",
		"- {users: [7]}":                                   "no name",
		"- {name: open, users: [7], path: /bin/open}":      `unknown key "path"`,
		"- {name: a, users: [7]}\n- {name: a, users: [8]}": "another entry",
	} {
		n, err := yamltree.Parse("a.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		p, err := ParseAsks(n)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v", text, p, err)
		}
		if err == nil && p[0].HasUser(7) == p.Names(port.Owner{Kind: port.OwnerContainer, Name: "web"}) {
			t.Errorf("%s: for others than it lists", text)
		}
	}
}
