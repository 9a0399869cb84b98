// SPDX-License-Identifier: Apache-2.0

//go:build unix

package link

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// openToken does not wait for a writer where the path is a FIFO.
func openToken(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
}

// ownedByUs reports whether fi belongs to root or to this process's user.
func ownedByUs(fi fs.FileInfo) (uid uint32, ok bool) {
	st, is := fi.Sys().(*syscall.Stat_t)
	if !is {
		return 0, false
	}
	return st.Uid, st.Uid == 0 || int(st.Uid) == os.Geteuid()
}

func privateFile(path string, fi fs.FileInfo) error {
	if uid, ok := ownedByUs(fi); !ok {
		return fmt.Errorf("%s belongs to uid %d: want uid %d or root", path, uid, os.Geteuid())
	}
	if p := fi.Mode().Perm(); p&0o077 != 0 {
		return fmt.Errorf("%s has mode %04o, others may read it: chmod 600 it, or remove it to have a new one made", path, p)
	}
	return nil
}

func privateDir(path string, fi fs.FileInfo) error {
	if uid, ok := ownedByUs(fi); !ok {
		return fmt.Errorf("directory %s belongs to uid %d: want uid %d or root", path, uid, os.Geteuid())
	}
	if p := fi.Mode().Perm(); p&0o022 != 0 {
		return fmt.Errorf("directory %s has mode %04o, others may write to it: chmod 700 it, or choose another", path, p)
	}
	return nil
}

// openDir lets all users enter a directory, but not list it. Only a directory that
// is fairlead's own is changed: one that it made, or of its name, on a path that no other
// user can redirect.
func openDir(dir string, made bool) (err error) {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(real, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	fi, err := f.Stat()
	if err != nil || fi.Mode().Perm()&0o001 != 0 {
		return err
	}
	if !made && filepath.Base(real) != "fairlead" {
		return fmt.Errorf("directory %s has mode %04o, the allowed users cannot enter it: chmod 711 it, or choose another", dir, fi.Mode().Perm())
	}
	if err := errors.Join(privateDir(dir, fi), trustedPath(dir), trustedPath(real)); err != nil {
		return fmt.Errorf("the allowed users cannot enter directory %s, and its mode is not changed: chmod 711 it, or choose another: %w", dir, err)
	}
	return f.Chmod(fi.Mode().Perm() | 0o011)
}

// trustedPath returns an error if a user other than root and ours can make path another
// file, by a symbolic link on it or by renaming a directory.
func trustedPath(path string) error {
	path, err := filepath.Abs(path)
	for first := true; err == nil; first = false {
		fi, serr := os.Lstat(path)
		if serr != nil {
			return serr
		}
		if uid, ok := ownedByUs(fi); !ok {
			return fmt.Errorf("%s belongs to uid %d", path, uid)
		}
		if !first && fi.IsDir() && fi.Mode().Perm()&0o022 != 0 && fi.Mode()&fs.ModeSticky == 0 {
			return fmt.Errorf("others can write to %s", path)
		}
		if path == filepath.Dir(path) {
			return nil
		}
		path = filepath.Dir(path)
	}
	return err
}

// restrict has nothing to do: files are made with mode 0600.
func restrict(string) error { return nil }
