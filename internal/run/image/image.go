// SPDX-License-Identifier: Apache-2.0

//go:build unix

// Package image makes a copy of a program that is to be run while it checks it, so that what
// is executed is what was checked.
package image

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Max bounds a program's file, in bytes. It is copied for each run.
const Max = 256 << 20

// ErrSum is in the error about a file that is not the one of the policy.
var ErrSum = errors.New("its SHA-256 is another than the policy's")

// copyTo copies the program at path, and requires that what was copied has the sum, in
// hexadecimal digits, and is a program of this system. Scripts are refused: their interpreter
// would be another program, which is not checked.
func copyTo(image *os.File, path, sum string) error {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0) // a FIFO does not block it
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if st, err := file.Stat(); err != nil || !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
		return errors.Join(fmt.Errorf("%s is no file that can be executed", path), err)
	}
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(image, h), io.LimitReader(file, Max+1))
	switch {
	case err != nil:
		return fmt.Errorf("copy %s: %w", path, err)
	case n > Max:
		return fmt.Errorf("%s has more than %d MiB", path, Max>>20)
	case hex.EncodeToString(h.Sum(nil)) != sum:
		return fmt.Errorf("%s: %w", path, ErrSum)
	}
	var magic [4]byte
	if _, err := image.ReadAt(magic[:], 0); err != nil || !native(magic) {
		return fmt.Errorf("%s is no program of this system (scripts cannot be run)", path)
	}
	return nil
}
