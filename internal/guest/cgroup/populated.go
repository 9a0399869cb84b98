// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
)

// Populated reports whether a cgroup's directory, or one below it, has a process.
func Populated(dir string) bool {
	if events, err := os.ReadFile(filepath.Join(dir, "cgroup.events")); err == nil {
		return bytes.Contains(events, []byte("populated 1"))
	}
	found := false // cgroup v1 has no such file
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return nil //nolint:nilerr // what is gone meanwhile has no process
		}
		if procs, err := os.ReadFile(path); err == nil && len(procs) > 0 {
			found = true
			return fs.SkipAll
		}
		return nil
	})
	return found
}
