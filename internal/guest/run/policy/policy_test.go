// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/yamltree"
	"github.com/fairlead/fairlead/internal/port"
)

const sum = "sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

func parse(t *testing.T, text string) (Policy, error) {
	t.Helper()
	n, err := yamltree.Parse("a.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	var p Policy
	if err = (&yamltree.Decoder{Checks: Checks()}).Decode(n, &p, `entries ("- name: backup")`); err == nil {
		err = p.Check()
	}
	return p, err
}

func TestPolicy(t *testing.T) {
	p, err := parse(t, `
- {name: backup, match: {name: "web*"}, path: /bin/b, `+sum+`, args: [--full, "[a-z]+|x|.*y"], env: [LANG], directory: /srv, user: nobody}
- {name: plain, match: {labels: {a: b}}, path: /bin/p, `+sum+`, user: 65534, tty: true, memory: 64MiB, processes: 5, time: 1h30m}
- {name: guest, users: [1000, root, nobody-of-this-name], path: /bin/p, `+sum+`, user: 65534}
`)
	if err != nil {
		t.Fatal(err)
	}
	web, other := port.Owner{Kind: port.OwnerContainer, Name: "web-1"}, port.Owner{Kind: port.OwnerContainer, Name: "other"}
	if !p.Names(web) || p.Names(other) || (Policy)(nil).Names(web) {
		t.Error("Names")
	}
	// An entry for users alone is for no container, also not for one of that name.
	if p[2:].Names(web) || p[2:].Names(port.Owner{Kind: port.OwnerContainer, Name: "root"}) || p.NamesUser(1001) || p[:2].NamesUser(1000) {
		t.Error("an entry is for others than it lists")
	}
	if !p.NamesUser(1000) || !p.Find("guest").HasUser(0) || p.Find("plain").HasUser(0) {
		t.Error("NamesUser")
	}
	if p.Find("nothing") != nil || p.Find("backup").Directory != "/srv" {
		t.Error("Find")
	}
	if p.Find("backup").TTY || !p.Find("plain").TTY {
		t.Error("a terminal is allowed that is not, or the reverse")
	}
	if e := p.Find("plain"); e.Memory != 64<<20 || e.Processes != 5 || e.Time != 90*time.Minute || !slices.Equal(e.Controllers(), []string{"memory", "pids"}) {
		t.Errorf("limits: %+v", e)
	}
	if e := p.Find("guest"); e.Memory != 0 || e.Processes != 0 || e.Time != 0 || len(e.Controllers()) > 0 {
		t.Errorf("no limits: %+v", e)
	}
	// The helper gets the entries as JSON.
	text, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	var again Policy
	if err := json.Unmarshal(text, &again); err != nil {
		t.Fatal(err)
	}
	if e := again.Find("plain"); !e.TTY || e.Memory != 64<<20 || e.Processes != 5 || e.Time != 90*time.Minute {
		t.Errorf("the helper has %+v", e)
	}
	for _, c := range []struct {
		name      string
		args, env []string
		want      string
	}{
		{"backup", []string{"--full", "abc"}, nil, ""},
		{"backup", []string{"--full", "0y"}, []string{"LANG=C=\n"}, ""},
		{"backup", []string{"--full"}, nil, "1 arguments, want 2"},
		{"backup", []string{"--full", "a", "b"}, nil, "3 arguments, want 2"},
		{"backup", []string{"--fully", "abc"}, nil, "argument 1"},
		{"backup", []string{"--full", "abc\n"}, nil, "argument 2"},
		{"backup", []string{"--full", "ab\nc"}, nil, "argument 2"},
		{"backup", []string{"--full", "\x00y"}, nil, "argument 2"},
		{"backup", []string{"--full", "abc"}, []string{"LC_ALL=C"}, `variable "LC_ALL"`},
		{"backup", []string{"--full", "abc"}, []string{"LANG"}, `variable "LANG"`},
		{"backup", []string{"--full", "abc"}, []string{"LANG=a\x00b"}, `variable "LANG"`},
		{"backup", []string{"--full", "abc"}, []string{"LANG=a", "LANG=b"}, "twice"},
		{"plain", nil, nil, ""},
		{"plain", []string{""}, nil, "1 arguments, want 0"},
	} {
		for _, p := range []Policy{p, again} {
			err := p.Find(c.name).Allows(c.args, c.env)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s %q %q: %v, want %q", c.name, c.args, c.env, err, c.want)
			}
		}
	}
}

// Who may run a program can change alone. An entry of another program is another one.
func TestKept(t *testing.T) {
	p, err := parse(t, "- {name: a, match: {name: web}, path: /bin/a, "+sum+", args: [x], user: nobody}")
	if err != nil {
		t.Fatal(err)
	}
	for text, kept := range map[string]bool{
		"- {name: a, match: {name: db}, path: /bin/a, " + sum + ", args: [x], user: nobody}":                true,
		"- {name: a, users: [7], path: /bin/a, " + sum + ", args: [x], user: nobody}":                       true,
		"- {name: b, match: {name: web}, path: /bin/a, " + sum + ", args: [x], user: nobody}":               false,
		"- {name: a, match: {name: web}, path: /bin/b, " + sum + ", args: [x], user: nobody}":               false,
		"- {name: a, match: {name: web}, path: /bin/a, " + sum + ", args: [y], user: nobody}":               false,
		"- {name: a, match: {name: web}, path: /bin/a, " + sum + ", args: [x], user: games}":                false,
		"- {name: a, match: {name: web}, path: /bin/a, " + sum + ", args: [x], user: nobody, tty: true}":    false,
		"- {name: a, match: {name: web}, path: /bin/a, " + sum + ", args: [x], user: nobody, env: [LANG]}":  false,
		"- {name: a, match: {name: web}, path: /bin/a, " + sum + ", args: [x], user: nobody, memory: 2GiB}": false,
	} {
		next, err := parse(t, text)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Kept(next); len(got) == 1 != kept || len(next) != 1 {
			t.Errorf("%s: kept %d", text, len(got))
		}
	}
}

// No variable can be listed that glibc ignores in setuid programs.
func TestInsecureVariables(t *testing.T) {
	for _, v := range []string{
		"GCONV_PATH", "GETCONF_DIR", "GLIBC_TUNABLES", "HOSTALIASES", "LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "LD_ANYTHING", "LOCALDOMAIN",
		"LOCPATH", "MALLOC_TRACE", "MALLOC_ARENA_MAX", "NIS_PATH", "NLSPATH", "RESOLV_HOST_CONF", "RES_OPTIONS", "TMPDIR", "TZDIR",
	} {
		if _, err := parse(t, "- {name: b, env: ["+v+"]}"); err == nil || !strings.Contains(err.Error(), `"`+v+`": the C library reads it`) {
			t.Errorf("%s: %v", v, err)
		}
	}
	for _, v := range []string{"LANG", "LC_ALL", "TZ", "LD", "OLD_X", "MY_TMPDIR", "TMPDIR_"} {
		if got, err := parseVariable(v); err != nil || got != v {
			t.Errorf("%s: %s, %v", v, got, err)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"{name: b}", "want a list"},
		{"- {name: b, path: /b, " + sum + ", user: u}", "nobody may run it"},
		{"- {match: {name: w}}", "no name"},
		{"- {name: 'a b'}", "want at most 64 letters"},
		{"- {name: b, match: {name: w}}", "no path"},
		{"- {name: b, users: [], path: /b, " + sum + ", user: u}", "nobody may run it"},
		{"- {name: b, users: ['']}", "a text that is not empty"},
		{"- {name: b, path: b}", "absolute path"},
		{"- {name: b, path: /a/../b}", "absolute path"},
		{"- {name: b, match: {name: w}, path: /b}", "no sha256"},
		{"- {name: b, sha256: 00}", "64 hexadecimal digits"},
		{"- {name: b, match: {name: w}, path: /b, " + sum + "}", "no user"},
		{"- {name: b, user: root}", "cannot run as root"},
		{"- {name: b, user: '00'}", "cannot run as root"},
		{"- {name: b, args: ['(']}", "missing closing"},
		{"- {name: b, args: [')|(']}", "unexpected )"},
		{"- {name: b, env: ['A=B']}", "name of a variable"},
		{"- {name: b, match: {ports: 80}}", `unknown key "ports"`},
		{"- {name: b, tty: maybe}", `"maybe": want true or false`},
		{"- {name: serve}", "has a command of this name"},
		{"- {name: b, memory: 64}", "such as 64MiB"},
		{"- {name: b, memory: 0MiB}", "such as 64MiB"},
		{"- {name: b, processes: 0}", "want a whole number from 1"},
		{"- {name: b, time: 100ms}", "want a duration"},
		{"- {name: b, guests: [g]}", `unknown key "guests"`},
		{"- {name: b, shell: x}", `unknown key "shell"`},
		{strings.Repeat("- {name: b, match: {name: w}, path: /b, "+sum+", user: u}\n", 2), "two entries have the name"},
	} {
		if p, err := parse(t, c.text); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v; want %q", c.text, p, err, c.want)
		}
	}
	if p, err := parse(t, ""); err != nil || len(p) != 0 {
		t.Errorf("no entries: %v, %v", p, err)
	}
}
