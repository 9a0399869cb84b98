// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func TestSettingsNameTheirSource(t *testing.T) {
	var flags Agent
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	flags.Flags(fs)
	if err := fs.Parse([]string{"--hold-down", "1s", "--source", "nat"}); err != nil {
		t.Fatal(err)
	}
	path := write(t, t.TempDir()+"/agent.yaml", "holdDown: 2s\nexpose: all\nnat: {maxPorts: 7}\n")
	env := func(name string) (string, bool) { return "debug", name == "FAIRLEAD_LOG_LEVEL" }
	c, err := LoadAgent(path, fs, env)
	if err != nil {
		t.Fatal(err)
	}
	list := c.Settings()
	for _, want := range []Setting{
		{"holdDown", "1s", "--hold-down"}, {"source", "nat", "--source"}, {"expose", "all", path + ":2:9"},
		{"nat.maxPorts", "7", path + ":3:17"}, {"logLevel", "debug", "FAIRLEAD_LOG_LEVEL"}, {"observer", "auto", "default"},
	} {
		if !slices.Contains(list, want) {
			i := slices.IndexFunc(list, func(s Setting) bool { return s.Key == want.Key })
			t.Errorf("%+v, want %+v", list[i], want)
		}
	}
	host, err := LoadHost(write(t, t.TempDir()+"/host.yaml", "grace: 5s\n"), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range host.Settings() {
		if s.Key == "grace" && (s.Value != "5s" || !strings.HasSuffix(s.From, "host.yaml:1:8")) {
			t.Errorf("%+v", s)
		}
	}
}

// Rules are reloaded with what they depend on; other settings wait for a restart.
func TestReloadedSettings(t *testing.T) {
	dir := t.TempDir()
	load := func(name, text string) []Setting {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := LoadAgent(path, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		return c.Settings()
	}
	rules := filepath.Join(dir, "rules.yaml")
	if err := os.WriteFile(rules, []byte("expose: all\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	before := load("a.yaml", "expose: loopback\nholdDown: 1s\n")
	next := load("b.yaml", "rulesFile: "+rules+"\nholdDown: 2s\n")
	if got := Waiting(before, next, "expose", "rulesFile"); !slices.Equal(got, []string{"holdDown"}) {
		t.Errorf("waiting: %q", got)
	}
	if got := Waiting(next, load("c.yaml", "holdDown: 2000ms\nrulesFile: "+rules+"\n")); len(got) != 0 {
		t.Errorf("the same values in another file wait: %q", got)
	}
	after := Reloaded(before, next, "expose")
	for key, want := range map[string]Setting{
		"expose":   {"expose", "all", rules},
		"holdDown": {"holdDown", "1s", filepath.Join(dir, "a.yaml") + ":2:11"},
	} {
		if i := slices.IndexFunc(after, func(s Setting) bool { return s.Key == key }); i < 0 || after[i] != want {
			t.Errorf("%s: %+v", key, after)
		}
	}
}

// A running agent's file, and what its settings say of flags and variables, make its settings.
func TestGivenMakesTheSameSettings(t *testing.T) {
	var flags Agent
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	flags.Flags(fs)
	if err := fs.Parse([]string{
		"--hold-down", "1s", "--source", "nat", "--source", "socket", "--link", "vsock://:1000", "--metrics-addr", "", "--labels", "--audit-interval", "0",
		"--expose", "all", "--sink", "gvproxy=http://gateway:80", "--allow-uids", "7,8", "--rules-file", "", "--log-level", "debug",
	}); err != nil {
		t.Fatal(err)
	}
	variables := map[string]string{"FAIRLEAD_OBSERVER": "poll", "FAIRLEAD_CONFIG": "/nowhere", "FAIRLEAD_METRICS_ADDR": ":1", "CATTLE_DEBUG": "1"}
	path := write(t, t.TempDir()+"/agent.yaml", "holdDown: 2s\nexpose: loopback\nnat: {maxPorts: 7}\nmetricsAddr: 127.0.0.1:9464\n")
	c, err := LoadAgent(path, fs, func(name string) (string, bool) { v, ok := variables[name]; return v, ok })
	if err != nil {
		t.Fatal(err)
	}
	want := c.Settings()
	again, err := LoadAgent(path, nil, Given(want))
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range again.Settings() {
		if s.Key != want[i].Key || s.Value != want[i].Value {
			t.Errorf("%s is %q, want %q (%s)", s.Key, s.Value, want[i].Value, want[i].From)
		}
	}
	if again.AuditGiven != c.AuditGiven || again.TokenGiven != c.TokenGiven {
		t.Errorf("audits given %v, token given %v, want %v and %v", again.AuditGiven, again.TokenGiven, c.AuditGiven, c.TokenGiven)
	}
}
