// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What doctor advises works as it is: without a file it is the one that a start would read.
func TestConfigCheckWithoutAFile(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	t.Setenv("XDG_CONFIG_HOME", dir)
	usual, other := filepath.Join(dir, "fairlead", "host.yaml"), filepath.Join(dir, "other.yaml")
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Mkdir(filepath.Dir(usual), 0o755), os.WriteFile(other, []byte("bindd: all\n"), 0o644)); err != nil { //nolint:gosec // another user reads it
		t.Fatal(err)
	}
	asUser(t, func() {
		check := func(want string, code int, args ...string) {
			t.Helper()
			var out, stderr bytes.Buffer
			got := run(t.Context(), append([]string{"config", "check"}, args...), &out, &stderr)
			if all := out.String() + stderr.String(); got != code || !strings.Contains(all, want) {
				t.Errorf("%q: exit %d: %s; want %d, %q", args, got, all, code, want)
			}
		}
		check(usual+": absent", exitOK, "--host")
		check(`"ok":true`, exitOK, "--host", "-o", "json")
		t.Setenv("FAIRLEAD_CONFIG", other)
		check(other+`:1:1: unknown key "bindd"`, exitError, "--host")
		t.Setenv("FAIRLEAD_CONFIG", filepath.Join(dir, "none.yaml"))
		check("no such file", exitError, "--host")
		check("takes at most one argument", exitUsage, "--host", "a", "b")
	})
}
