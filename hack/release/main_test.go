// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os/exec"
	"strings"
	"testing"
)

// Until there is a tag, the error is what a reader of the documents sees.
func TestErrorWithoutATag(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, args := range [][]string{{"init", "-q"}, {"-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-q", "--allow-empty", "-m", "x"}} {
		if out, err := exec.Command("git", args...).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	err := run(t.Context(), []string{"-out", t.TempDir()})
	if err == nil || !strings.Contains(err.Error(), "`make release VERSION=v0.1.0`") {
		t.Error(err)
	}
}
