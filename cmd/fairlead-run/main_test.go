// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Each wrong command line is one line and the status 2; what was not run has 125.
func TestCommandLine(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "run.yaml")
	if err := os.WriteFile(bad, []byte("jobs: many\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{nil, 2, "want a NAME"},
		{[]string{"backup", "all"}, 2, "after --"},
		{[]string{"--host", "backup"}, 2, "unknown flag: --host"},
		{[]string{"backup", "-e", "NOT_SET_HERE"}, 2, "it is not set here"},
		{[]string{"backup", "--", "\xff"}, 2, "is not UTF-8"},
		{[]string{"--socket", dir + "/s", "backup"}, 125, "mount the guest's socket there"},
		{[]string{"--socket", dir + "/s", "help"}, 125, "mount the guest's socket there"}, // no command
		{[]string{"serve", "x"}, 2, "serve takes no argument"},
		{[]string{"serve", "--check", "--config", bad}, 1, bad + ":1:"},
		{[]string{"serve", "--check", "--config", os.DevNull}, 0, ""},
		{[]string{"--version"}, 0, "fairlead-run "},
		{[]string{"--help"}, 0, "Usage:"},
	} {
		var out bytes.Buffer
		status := execute(c.args, strings.NewReader(""), &out, &out)
		if status != c.status || !strings.Contains(out.String(), c.want) || status != 0 && strings.Count(out.String(), "\n") != 1 {
			t.Errorf("%q: status %d, want %d\n%s, want %s", c.args, status, c.status, &out, c.want)
		}
	}
}
