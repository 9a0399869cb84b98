// SPDX-License-Identifier: Apache-2.0

//go:build unix && !linux

package image

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
)

// Private copies a program to a file that no other user can change, in a directory of its
// own, and requires that what was copied has the sum. remove removes both. Other than in
// Linux, processes of the same user can change the copy before it is executed.
func Private(path, sum string) (program string, remove func(), err error) {
	dir, err := os.MkdirTemp("", "fairlead-job-") // mode 0700
	if err != nil {
		return "", nil, err
	}
	remove = func() { _ = os.RemoveAll(dir) }
	defer func() {
		if err != nil {
			remove()
		}
	}()
	program = filepath.Join(dir, filepath.Base(path))
	image, err := os.OpenFile(program, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o500)
	if err != nil {
		return "", nil, err
	}
	return program, remove, errors.Join(copyTo(image, path, sum), image.Close())
}

// native reports whether a file that begins with these bytes is a program of this system:
// Mach-O, of one architecture in either byte order, or of several.
func native(magic [4]byte) bool {
	return slices.Contains([]uint32{0xfeedface, 0xcefaedfe, 0xfeedfacf, 0xcffaedfe, 0xcafebabe, 0xcafebabf}, binary.BigEndian.Uint32(magic[:]))
}
