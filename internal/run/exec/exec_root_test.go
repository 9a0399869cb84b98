// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package exec

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// Another user cannot make a cgroup here: what a program started is found among all processes.
func TestKilledWithItsCallerWithoutGroup(t *testing.T) {
	path, sum := program(t)
	for dir := filepath.Dir(path); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	killHost(t, path, sum, &syscall.Credential{Uid: 65534, Gid: 65534})
}
