// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
)

var variable = regexp.MustCompile(`FAIRLEAD_[A-Z0-9_]+`)

// The variables of tests and scripts are not similar to a setting: agents that inherit them
// would warn of a mistake.
func TestVariablesOfTestsCauseNoWarning(t *testing.T) {
	seen := make(map[string]bool)
	for _, top := range []string{"Makefile", "hack", "test", "internal", "cmd"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, d fs.DirEntry, err error) error {
			test := strings.HasSuffix(path, "_test.go") || top != "internal" && top != "cmd"
			if err != nil || !d.Type().IsRegular() || !test || filepath.Base(path) == "config_test.go" { // which tests the warning
				return err
			}
			b, err := os.ReadFile(path)
			for _, name := range variable.FindAllString(string(b), -1) {
				if seen[name] {
					continue
				}
				seen[name] = true
				for _, warning := range config.UnknownVariables([]string{name + "=1"}) {
					t.Errorf("%s: %s", path, warning)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) < 20 {
		t.Errorf("found %d variables", len(seen))
	}
}

// alias is a row of docs/remote.md about a variable of older agents and the flag that it
// stands for.
var alias = regexp.MustCompile("(?m)^\\| `(CATTLE_[A-Z_]+)` \\| .*`(--[a-z-]+)( [a-z]+)?`.* \\| `(--[a-z-]+)` or `(FAIRLEAD_[A-Z_]+)` is set \\|$")

// Each variable of older agents that the documents call an alias sets what they say, and
// less than fairlead's own variable does.
func TestAliasesOfOlderAgents(t *testing.T) {
	values := map[string][2]string{ // the older variable's, and another one for our own
		"CATTLE_SERVER":      {"hub.example:8443", "wss://other.example"},
		"CATTLE_CA_CHECKSUM": {strings.Repeat("a", 64), strings.Repeat("b", 64)},
		"CATTLE_DEBUG":       {"true", "warn"},
	}
	remote, err := os.ReadFile(filepath.Join(root, "docs/remote.md"))
	if err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	from := func(environ map[string]string, key string) string {
		c, err := config.LoadAgent(empty, nil, func(name string) (string, bool) {
			v, ok := environ[name]
			return v, ok
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range c.Settings() {
			if s.Key == key {
				return s.From
			}
		}
		return ""
	}
	rows := alias.FindAllStringSubmatch(string(remote), -1)
	for _, row := range rows {
		older, own := row[1], row[5]
		key := map[string]string{"--link": "link", "--link-pin": "linkPin", "--log-level": "logLevel"}[row[4]]
		v, ok := values[older]
		if !ok {
			t.Errorf("%s has no value in this test", older)
			continue
		}
		environ := map[string]string{older: v[0]}
		if got := from(environ, key); got != older {
			t.Errorf("%s does not set %q, which is from %q", older, key, got)
		}
		environ[own] = v[1]
		if got := from(environ, key); got != own {
			t.Errorf("%s does not count before %s: %q is from %q", own, older, key, got)
		}
		delete(values, older)
	}
	for older := range values {
		t.Errorf("docs/remote.md has no row for %s", older)
	}
	table, err := os.ReadFile(filepath.Join(root, "docs/from-older-agents.md"))
	if err != nil {
		t.Fatal(err)
	}
	claimed := regexp.MustCompile("`(CATTLE_[A-Z_]+)`( \\|| is) an alias").FindAllStringSubmatch(string(table), -1)
	if len(claimed) != len(rows) {
		t.Errorf("%q are aliases in docs/from-older-agents.md, %d in docs/remote.md", claimed, len(rows))
	}
}
