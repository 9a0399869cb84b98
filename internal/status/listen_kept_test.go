// SPDX-License-Identifier: Apache-2.0

package status

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A mistyped path of the control socket costs nobody a file.
func TestControlSocketReplacesNoFile(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	file, folder := filepath.Join(dir, "notes"), filepath.Join(dir, "folder")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, folder} {
		if _, err := ListenControl(path); err == nil || !strings.Contains(err.Error(), path+": it exists and is not a socket") {
			t.Errorf("%s: %v", path, err)
		}
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}
