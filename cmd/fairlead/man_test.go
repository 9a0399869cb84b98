// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Each command has a page, with the sections that cobra does not make.
func TestManualPages(t *testing.T) {
	dir := t.TempDir()
	if _, stderr, code := execute(t, "man", dir); code != exitOK {
		t.Fatal(stderr)
	}
	for _, name := range []string{"fairlead", "fairlead-ls", "fairlead-host-install", "fairlead-explain"} {
		b, err := os.ReadFile(filepath.Join(dir, name+".1"))
		if err != nil {
			t.Fatal(err)
		}
		page := string(b)
		last := -1
		for _, section := range []string{".SH NAME", ".SH SYNOPSIS", ".SH EXIT STATUS", ".SH FILES"} {
			at := strings.Index(page, section+"\n")
			if at <= last {
				t.Errorf("%s: %q is missing, or not in order", name, section)
			}
			last = at
		}
		if see := strings.Index(page, ".SH SEE ALSO"); see >= 0 && see < last {
			t.Errorf("%s: SEE ALSO is not the last section", name)
		}
		if !strings.Contains(page, `/etc/fairlead/agent.yaml`) {
			t.Errorf("%s: no files", name)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "fairlead-man.1")); err == nil {
		t.Error("a hidden command has a page")
	}
}
