// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// File types of the mode word (cpio(5), the same as in stat(2)).
const (
	modeFile    = 0o100000
	modeDir     = 0o040000
	modeSymlink = 0o120000
)

// archive writes the "newc" form of cpio that the kernel unpacks as initramfs
// (Documentation/driver-api/early-userspace/buffer-format.rst). All belongs to root.
type archive struct {
	w   io.Writer
	ino int
	n   int64 // bytes written
}

// entry adds one file, directory or symlink; mode includes the type.
func (a *archive) entry(name string, mode uint32, size int64, body io.Reader) error {
	a.ino++
	nlink := 1
	if mode&modeDir != 0 {
		nlink = 2
	}
	// magic ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
	head := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		a.ino, mode, 0, 0, nlink, 0, size, 0, 0, 0, 0, len(name)+1, 0, name)
	if err := a.write([]byte(head)); err != nil {
		return fmt.Errorf("archive %s: %w", name, err)
	}
	if err := a.pad(4); err != nil {
		return fmt.Errorf("archive %s: %w", name, err)
	}
	if body != nil {
		n, err := io.CopyN(a.w, body, size)
		a.n += n
		if err != nil {
			return fmt.Errorf("archive %s: %w", name, err)
		}
	}
	return a.pad(4)
}

func (a *archive) write(b []byte) error {
	n, err := a.w.Write(b)
	a.n += int64(n)
	return err
}

// pad fills with zeros up to a multiple of to.
func (a *archive) pad(to int64) error {
	if rest := a.n % to; rest != 0 {
		return a.write(make([]byte, to-rest))
	}
	return nil
}

// tree adds everything below dir, named relative to root.
func (a *archive) tree(dir, root string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		perm := uint32(info.Mode().Perm())
		switch {
		case info.IsDir():
			return a.entry(name, modeDir|perm, 0, nil)
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return a.entry(name, modeSymlink|0o777, int64(len(to)), strings.NewReader(to))
		case info.Mode().IsRegular():
			return a.file(name, perm, path)
		}
		return fmt.Errorf("archive %s: neither file, directory nor symlink", path)
	})
}

// file adds the content of the regular file at path.
func (a *archive) file(name string, perm uint32, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return a.entry(name, modeFile|perm, info.Size(), f)
}

// end closes the archive and aligns what may follow it to 512 bytes: the kernel
// unpacks one archive after the other.
func (a *archive) end() error {
	if err := a.entry("TRAILER!!!", 0, 0, nil); err != nil {
		return err
	}
	return a.pad(512)
}
