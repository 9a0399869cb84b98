// SPDX-License-Identifier: Apache-2.0

//go:build unix

package trust

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
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
	if uid, ok := Owner(fi); !ok {
		return foreign(path, uid, fi)
	}
	if p := fi.Mode().Perm(); othersWrite(fi, runtime.GOOS) {
		return untrusted("%s has mode %04o, others can write to it: chmod go-w %s", path, p, path)
	}
	return Path(path)
}

// Path returns an error if a user other than root and the process's own can make path
// another file: by a symbolic link on it, or by renaming what it leads through.
func Path(path string) error { return follow(path, checkPath) }

// Dir returns an error if such a user can replace what is in a directory, or the
// directory.
func Dir(dir string) error { return follow(dir, checkDir) }

// follow checks a path, and where its symbolic links lead.
func follow(path string, check func(string) error) error {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	path, err = filepath.Abs(path)
	if err != nil || path == real {
		return errors.Join(err, check(real))
	}
	return errors.Join(check(path), check(real))
}

// checkPath checks path and the directories above it.
func checkPath(path string) error {
	fi, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if uid, ok := Owner(fi); !ok {
		return foreign(path, uid, fi)
	}
	if path == filepath.Dir(path) {
		return nil
	}
	return checkDir(filepath.Dir(path))
}

// checkDir is checkPath of a directory, and checks that no other user can rename what
// is in it.
func checkDir(dir string) error {
	fi, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if p := fi.Mode().Perm(); fi.IsDir() && othersWrite(fi, runtime.GOOS) && fi.Mode()&fs.ModeSticky == 0 {
		return untrusted("directory %s has mode %04o, others can replace what is in it: chmod go-w %s", dir, p, dir)
	}
	return checkPath(dir)
}

// adminGroup is the group "admin" of macOS. Its members become root by sudo, so what they
// can change is as safe as what root can. Homebrew gives it the directories of its programs.
const adminGroup = 80

// othersWrite reports whether the mode of a file lets users write to it who are neither its
// owner nor, on macOS, administrators.
func othersWrite(fi fs.FileInfo, goos string) bool {
	others := fs.FileMode(0o022)
	if st, is := fi.Sys().(*syscall.Stat_t); is && goos == "darwin" && st.Gid == adminGroup {
		others = 0o002
	}
	return fi.Mode().Perm()&others != 0
}

// Owner returns whom a file belongs to, and whether that is root or the process's user.
func Owner(fi fs.FileInfo) (uid uint32, ok bool) {
	st, is := fi.Sys().(*syscall.Stat_t)
	if !is {
		return 0, false
	}
	return st.Uid, st.Uid == 0 || int(st.Uid) == os.Geteuid()
}

// untrusted returns an error that is [ErrUntrusted].
func untrusted(format string, args ...any) error {
	return untrustedError(fmt.Sprintf(format, args...))
}

type untrustedError string

func (e untrustedError) Error() string        { return string(e) }
func (e untrustedError) Is(target error) bool { return target == ErrUntrusted }

// foreign returns an error about a file of another user, with the command that mends it.
func foreign(path string, uid uint32, fi fs.FileInfo) error {
	chown := "chown root"
	if fi.Mode()&fs.ModeSymlink != 0 {
		chown = "chown -h root"
	}
	return untrusted("%s belongs to uid %d: want root%s: %s %s", path, uid, orUs(), chown, path)
}

// orUs names our user, unless that is root.
func orUs() string {
	if os.Geteuid() == 0 {
		return ""
	}
	return fmt.Sprintf(" or uid %d", os.Geteuid())
}
