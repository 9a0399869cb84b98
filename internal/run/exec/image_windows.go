// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/windows"
)

// maxImage bounds a program's file, in bytes. It is read for each run.
const maxImage = 256 << 20

// image is the file of a program. While it is open nobody can write, rename or remove it, nor
// rename a folder above it.
type image struct {
	*os.File
	path string // leads to it through no link
}

// openImage opens a program, and requires that it has the sum, in hexadecimal digits, and is an
// image that the kernel loads itself. It refuses scripts: CreateProcess gives .bat and .cmd to
// cmd.exe, which reads arguments as commands.
func openImage(path, sum string) (*image, error) {
	if err := checkPath(path); err != nil {
		return nil, err
	}
	name, err := windows.UTF16PtrFromString(path)
	if err != nil {
		return nil, fmt.Errorf("%q: %w", path, err)
	}
	// A link as the last part of the path is opened itself.
	h, err := windows.CreateFile(name, windows.GENERIC_READ, windows.FILE_SHARE_READ, nil, windows.OPEN_EXISTING, windows.FILE_FLAG_OPEN_REPARSE_POINT, 0)
	switch {
	case errors.Is(err, windows.ERROR_SHARING_VIOLATION):
		return nil, fmt.Errorf("open %s: a process that can change it has it open: %w", path, err)
	case err != nil:
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	i := &image{File: os.NewFile(uintptr(h), path)}
	if err := i.check(h, sum); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), i.Close())
	}
	return i, nil
}

// checkPath refuses paths of shares, devices and streams.
func checkPath(path string) error {
	volume := filepath.VolumeName(path)
	if len(volume) != 2 || !filepath.IsAbs(path) || strings.ContainsAny(path[2:], `:*?"<>|`) || !strings.EqualFold(filepath.Ext(path), ".exe") {
		return fmt.Errorf(`%q: want the path of an .exe on a local drive, such as C:\Tools\backup.exe`, path)
	}
	return nil
}

func (i *image) check(h windows.Handle, sum string) error {
	var info windows.ByHandleFileInformation
	if err := windows.GetFileInformationByHandle(h, &info); err != nil {
		return err
	}
	kind, err := windows.GetFileType(h)
	if err != nil || kind != windows.FILE_TYPE_DISK || info.FileAttributes&(windows.FILE_ATTRIBUTE_DIRECTORY|windows.FILE_ATTRIBUTE_REPARSE_POINT) != 0 {
		return errors.Join(errors.New("it is no plain file (a link is none)"), err)
	}
	if i.path, err = finalPath(h); err != nil {
		return err
	}
	hash := sha256.New()
	n, err := io.Copy(hash, io.LimitReader(i, maxImage+1))
	switch {
	case err != nil:
		return err
	case n > maxImage:
		return fmt.Errorf("it has more than %d MiB", maxImage>>20)
	case hex.EncodeToString(hash.Sum(nil)) != sum:
		return ErrChanged
	}
	return requirePE(i)
}

// finalPath returns the path of an open file, in which all links are resolved. Folders above
// can be links: it leads to the file that is open whatever becomes of them.
func finalPath(h windows.Handle) (string, error) {
	buf := make([]uint16, windows.MAX_LONG_PATH)
	n, err := windows.GetFinalPathNameByHandle(h, &buf[0], uint32(len(buf)), 0)
	if err != nil || int(n) > len(buf) {
		return "", errors.Join(errors.New("it has no path"), err)
	}
	path := strings.TrimPrefix(windows.UTF16ToString(buf), `\\?\`)
	if err := checkPath(path); err != nil {
		return "", err
	}
	root, err := windows.UTF16PtrFromString(path[:3])
	if err != nil {
		return "", err
	}
	if windows.GetDriveType(root) != windows.DRIVE_FIXED {
		return "", fmt.Errorf("%s is no fixed drive of this machine", path[:3])
	}
	return path, nil
}

// requirePE refuses what is no image of a program: scripts, and programs of DOS.
func requirePE(r io.ReaderAt) error {
	dos := make([]byte, 64)
	magic := make([]byte, 4)
	if _, err := r.ReadAt(dos, 0); err == nil && string(dos[:2]) == "MZ" {
		if _, err := r.ReadAt(magic, int64(binary.LittleEndian.Uint32(dos[60:]))); err == nil && string(magic) == "PE\x00\x00" {
			return nil
		}
	}
	return errors.New("it is no program of Windows (scripts cannot be run)")
}
