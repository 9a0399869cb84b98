// SPDX-License-Identifier: Apache-2.0

//go:build unix

package trust

import (
	"os"
	"path/filepath"
	"slices"
)

// InPath returns the path of a program of this process's user, which may be in any
// directory of PATH that is absolute. It refuses one that another user can change.
func InPath(name string) (string, error) {
	return find(name, slices.DeleteFunc(filepath.SplitList(os.Getenv("PATH")), func(dir string) bool { return !filepath.IsAbs(dir) })...)
}
