// SPDX-License-Identifier: Apache-2.0

//go:build linux

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
	"time"

	"golang.org/x/sys/unix"
)

// Max bounds a program's file, in bytes. It is copied for each run.
const Max = 256 << 20

// ErrSum is in the error about a file that is not the one of the policy.
var ErrSum = errors.New("its SHA-256 is another than the policy's")

// copyTo copies the program at path, and requires that what was copied has the sum, in
// hexadecimal digits, and is a program of Linux. Scripts are refused: their interpreter
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
	if _, err := image.ReadAt(magic[:], 0); err != nil || string(magic[:]) != "\x7fELF" {
		return fmt.Errorf("%s is no program of this system (scripts cannot be run)", path)
	}
	return nil
}

// Seal copies a program to memory that nobody can change any more, and requires that
// what was copied has the sum. What happens to the file afterwards has no effect.
func Seal(path, sum string) (image *os.File, err error) {
	image, err = memory()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = image.Close()
		}
	}()
	if err := copyTo(image, path, sum); err != nil {
		return nil, err
	}
	if err := seal(image, sealLimit); err != nil {
		return nil, fmt.Errorf("seal the copy of %s: %w", path, err)
	}
	return image, nil
}

// sealLimit bounds the time in which a copy must become free.
const sealLimit = 10 * time.Second

// seal forbids all changes of an anonymous file. The kernel refuses that with EBUSY while anybody
// holds one of its pages, and waits only 150 ms for that (memfd_wait_for_pins of Linux 6.18). The
// kernel itself holds pages for moments, and longer where processors are busy, as when it moves
// them. So it is tried again until the limit.
func seal(image *os.File, limit time.Duration) error {
	const all = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	for end := time.Now().Add(limit); ; time.Sleep(10 * time.Millisecond) {
		_, err := unix.FcntlInt(image.Fd(), unix.F_ADD_SEALS, all)
		if !errors.Is(err, unix.EBUSY) || !time.Now().Before(end) {
			return err
		}
	}
}

// memory makes an anonymous file that can be sealed and executed.
func memory() (*os.File, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("fairlead-job", flags|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3, where all can be executed
		fd, err = unix.MemfdCreate("fairlead-job", flags)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), "fairlead-job"), nil
}
