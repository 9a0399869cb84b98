// SPDX-License-Identifier: Apache-2.0

//go:build unix

package trust

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
)

// Find returns the path of a system's program, whatever PATH holds. It refuses one that
// another user can change.
func Find(name string) (string, error) {
	return find(name, "/usr/bin", "/bin", "/usr/sbin", "/sbin", "/run/current-system/sw/bin")
}

func find(name string, dirs ...string) (string, error) {
	for _, dir := range dirs {
		path := filepath.Join(dir, name)
		err := Program(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		return path, err
	}
	return "", fmt.Errorf("%s: %w in %v", name, fs.ErrNotExist, dirs)
}
