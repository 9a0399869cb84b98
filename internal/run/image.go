// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// maxImage bounds a program's file, which is copied to memory for each run.
const maxImage = 256 << 20

// errSum is in the error about a file that is not the one of the policy.
var errSum = errors.New("its SHA-256 is another than the policy's")

// seal copies a program to memory that nobody can change any more, and requires that
// what was copied has the sum. What happens to the file afterwards has no effect.
func seal(path, sum string) (image *os.File, err error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0) // a FIFO does not block it
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	if st, err := file.Stat(); err != nil || !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
		return nil, errors.Join(fmt.Errorf("%s is no file that can be executed", path), err)
	}
	image, err = memory()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = image.Close()
		}
	}()
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(image, h), io.LimitReader(file, maxImage+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("copy %s: %w", path, err)
	case n > maxImage:
		return nil, fmt.Errorf("%s has more than %d MiB", path, maxImage>>20)
	case hex.EncodeToString(h.Sum(nil)) != sum:
		return nil, fmt.Errorf("%s: %w", path, errSum)
	}
	if _, err := unix.FcntlInt(image.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE); err != nil {
		return nil, fmt.Errorf("seal the copy of %s: %w", path, err)
	}
	return image, requireELF(image, path)
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

// requireELF refuses scripts: their interpreter would be another program, which is not checked.
func requireELF(image *os.File, path string) error {
	var magic [4]byte
	if _, err := image.ReadAt(magic[:], 0); err != nil || string(magic[:]) != "\x7fELF" {
		return fmt.Errorf("%s is no ELF program (scripts cannot be run)", path)
	}
	return nil
}
