// SPDX-License-Identifier: Apache-2.0

package trust

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// InPath returns the path of a program of this process's user, which may be in any
// directory of PATH that is absolute. The working directory is not searched.
func InPath(name string) (string, error) {
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		path := filepath.Join(dir, name+".exe")
		if fi, err := os.Stat(path); filepath.IsAbs(dir) && err == nil && fi.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s.exe: %w in PATH", name, fs.ErrNotExist)
}
