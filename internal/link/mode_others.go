// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package link

import (
	"io/fs"
	"os"
)

func setMode(path string, mode fs.FileMode) error { return os.Chmod(path, mode) }
