// SPDX-License-Identifier: Apache-2.0

package image

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

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
	if _, err := unix.FcntlInt(image.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE); err != nil {
		return nil, fmt.Errorf("seal the copy of %s: %w", path, err)
	}
	return image, nil
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

// native reports whether a file that begins with these bytes is a program of this system.
func native(magic [4]byte) bool { return string(magic[:]) == "\x7fELF" }
