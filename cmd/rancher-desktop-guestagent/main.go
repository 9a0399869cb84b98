// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command rancher-desktop-guestagent is a drop-in for Rancher Desktop's guest agent. It
// starts the fairlead that is in its own directory, or else in PATH, which takes the same
// flags when it is started under this name. A link of this name to fairlead does the same.
package main

import (
	"os"
	"path/filepath"
	"syscall"

	"github.com/fairlead/fairlead/internal/config/trust"
)

func main() {
	program, err := find()
	if err == nil {
		err = syscall.Exec(program, append([]string{"rancher-desktop-guestagent"}, os.Args[1:]...), os.Environ())
	}
	_, _ = os.Stderr.WriteString("rancher-desktop-guestagent: cannot start fairlead: " + err.Error() + "\n")
	os.Exit(1)
}

// find returns the path of fairlead.
func find() (string, error) {
	self, err := os.Executable()
	if err == nil {
		self = filepath.Join(filepath.Dir(self), "fairlead")
		if _, err := os.Stat(self); err == nil {
			return self, nil
		}
	}
	return trust.InPath("fairlead")
}
