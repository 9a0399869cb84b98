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

	"github.com/fairlead/fairlead/internal/config/trust"
)

// openToken does not wait for a writer where the path is a FIFO.
func openToken(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
}

func privateFile(path string, fi fs.FileInfo) error {
	if uid, ok := trust.Owner(fi); !ok {
		return fmt.Errorf("%s belongs to uid %d: want uid %d or root", path, uid, os.Geteuid())
	}
	if p := fi.Mode().Perm(); p&0o077 != 0 {
		return fmt.Errorf("%s has mode %04o, others may read it: chmod 600 it, or remove it to have a new one made", path, p)
	}
	return trust.Path(path)
}

func privateDir(path string, fi fs.FileInfo) error {
	if uid, ok := trust.Owner(fi); !ok {
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
	if err := errors.Join(privateDir(dir, fi), trust.Path(dir)); err != nil {
		return fmt.Errorf("the allowed users cannot enter directory %s, and its mode is not changed: chmod 711 it, or choose another: %w", dir, err)
	}
	return f.Chmod(fi.Mode().Perm() | 0o011)
}

// trustedDir returns an error if a user other than root and ours can replace what is in a
// directory.
func trustedDir(dir string) error { return trust.Dir(dir) }

// restrict has nothing to do: files are made with mode 0600.
func restrict(string) error { return nil }
