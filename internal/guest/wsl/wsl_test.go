// SPDX-License-Identifier: Apache-2.0

package wsl

import (
	"os"
	"path/filepath"
	"testing"
)

func TestHere(t *testing.T) {
	for release, want := range map[string]bool{
		"6.6.87.2-microsoft-standard-WSL2\n": true, "4.4.0-19041-Microsoft\n": true, "6.12.9-amd64\n": false, "": false,
	} {
		root := t.TempDir()
		dir := filepath.Join(root, "proc/sys/kernel")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "osrelease"), []byte(release), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := Here(root); got != want {
			t.Errorf("release %q: got %v", release, got)
		}
	}
	if Here(t.TempDir()) {
		t.Error("a machine without the file is not WSL")
	}
}
