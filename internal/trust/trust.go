// SPDX-License-Identifier: Apache-2.0

//go:build unix

// Package trust reads files only if no user but root and the process's own can change
// them.
package trust

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// ReadFile reads a regular file of at most limit bytes. It refuses one that another user
// owns, can write to, or can replace, also by a symbolic link on its path.
func ReadFile(path string, limit int64) (b []byte, err error) {
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	b, err = io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, limit)
	}
	return b, err
}

// Program returns an error if another user than root and the process's own can change
// or replace the program at path, which must be absolute.
func Program(path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("program %q: want an absolute path", path)
	}
	f, err := open(path)
	if err != nil {
		return err
	}
	return f.Close()
}

// open opens a file that only root and our user can change. It does not wait where the
// path is a FIFO.
func open(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if err := check(path, f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func check(path string, f *os.File) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", path)
	}
	if uid, ok := ownedByUs(fi); !ok {
		return fmt.Errorf("%s belongs to uid %d: want root%s", path, uid, orUs())
	}
	if p := fi.Mode().Perm(); p&0o022 != 0 {
		return fmt.Errorf("%s has mode %04o, others can write to it: chmod go-w it", path, p)
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	return errors.Join(checkPath(path), checkPath(real))
}

// checkPath returns an error if another user can make path another file: by a symbolic
// link on it, or by renaming what it leads through.
func checkPath(path string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	for entry := true; ; entry = false {
		fi, err := os.Lstat(path)
		if err != nil {
			return err
		}
		if uid, ok := ownedByUs(fi); !ok {
			return fmt.Errorf("%s belongs to uid %d: want root%s", path, uid, orUs())
		}
		if p := fi.Mode().Perm(); !entry && fi.IsDir() && p&0o022 != 0 && fi.Mode()&fs.ModeSticky == 0 {
			return fmt.Errorf("directory %s has mode %04o, others can replace what is in it: chmod go-w it", path, p)
		}
		if path == filepath.Dir(path) {
			return nil
		}
		path = filepath.Dir(path)
	}
}

// ownedByUs reports whether a file belongs to root or to this process's user, and else
// to whom.
func ownedByUs(fi fs.FileInfo) (uid uint32, ok bool) {
	st, is := fi.Sys().(*syscall.Stat_t)
	if !is {
		return 0, false
	}
	return st.Uid, st.Uid == 0 || int(st.Uid) == os.Geteuid()
}

// orUs names our user, unless that is root.
func orUs() string {
	if os.Geteuid() == 0 {
		return ""
	}
	return fmt.Sprintf(" or uid %d", os.Geteuid())
}
