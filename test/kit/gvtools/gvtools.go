// SPDX-License-Identifier: Apache-2.0

// Package gvtools builds the commands of the module in test/gvproxy: gvproxy, which
// runs on the host, and vm, which carries the frames of the guest's tap device to it.
package gvtools

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Build builds the commands in dir, from a package beside test/gvproxy.
func Build(dir string) error {
	build := exec.Command("go", "build", "-o", dir+"/", "tool")
	build.Dir = filepath.Join("..", "gvproxy")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build gvproxy: %w\n%s", err, out)
	}
	return nil
}
