// SPDX-License-Identifier: Apache-2.0

// Package wsl recognises the Windows Subsystem for Linux from inside a distribution.
package wsl

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/fairlead/fairlead/internal/config/trust"
)

// Kernel reports whether a kernel of this release, as uname(2) returns it, is WSL's:
// "5.15.90.1-microsoft-standard-WSL2", "4.4.0-19041-Microsoft" for version 1.
func Kernel(release string) bool { return strings.Contains(strings.ToLower(release), "microsoft") }

// Here reports whether the machine whose files are in root runs WSL's kernel.
func Here(root string) bool {
	release, _ := os.ReadFile(filepath.Join(root, "proc/sys/kernel/osrelease"))
	return Kernel(string(release))
}

// NetworkingMode asks WSL's own program for the networking mode, such as "nat".
func NetworkingMode(ctx context.Context) (string, error) {
	wslinfo, err := trust.Find("wslinfo")
	if err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, wslinfo, "--networking-mode").Output()
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(out)), nil
}
