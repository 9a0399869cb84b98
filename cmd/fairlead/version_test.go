// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
	"testing"
)

// execute runs a command line and returns what it prints and its exit status.
func execute(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(t.Context(), args, &out, &err)
	return out.String(), err.String(), code
}

func TestVersionPrintsLicences(t *testing.T) {
	out, _, code := execute(t, "version", "--licenses")
	if code != exitOK || !strings.Contains(out, "Mozilla Public License") {
		t.Errorf("exit %d, %d bytes", code, len(out))
	}
	t.Setenv("FAIRLEAD_CLIENT_CONTROL", t.TempDir()+"/none")
	out, _, code = execute(t, "version")
	if code != exitOK || !strings.HasPrefix(out, "fairlead ") || strings.Count(out, "\n") != 1 {
		t.Errorf("exit %d, %q", code, out)
	}
}
