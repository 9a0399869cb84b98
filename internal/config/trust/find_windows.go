// SPDX-License-Identifier: Apache-2.0

package trust

import (
	"path/filepath"

	"golang.org/x/sys/windows"
)

// Find returns the path of one of the system's programs, whatever PATH and the working
// directory hold.
func Find(name string) (string, error) {
	dir, err := windows.GetSystemDirectory()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, name), nil
}
