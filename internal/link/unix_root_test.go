// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package link

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// asUser runs f on a thread of another user, which then ends.
func asUser(t *testing.T, uid uintptr, f func() error) error {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
			done <- errno
			return
		}
		done <- f()
	}()
	return <-done
}

// Which other users can connect is decided by AllowUIDs alone: neither the mode of the
// socket nor that of its directory keeps an allowed one away.
func TestAllowedUserConnects(t *testing.T) {
	const uid = 12345
	for _, c := range []struct {
		name     string
		dir      string      // of the socket
		mode     fs.FileMode // of that directory before, 0 if it is not there
		allow    []uint32
		listen   string // error of listening
		connects func(error) bool
	}{
		{"new directory", "new", 0, []uint32{uid}, "", succeeded},
		{"directory of an earlier run", "fairlead", 0o700, []uint32{uid}, "", succeeded},
		{"open directory", "open", 0o755, []uint32{uid}, "", succeeded},
		{"private directory of others", "private", 0o700, []uint32{uid}, "chmod 711", nil},
		{"another user is allowed", "new", 0, []uint32{uid + 1}, "", refusedUID},
		{"nobody is allowed", "new", 0, nil, "", func(err error) bool { return errors.Is(err, syscall.EACCES) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(publicDir(t), c.dir, "s")
			if c.mode != 0 {
				if err := os.Mkdir(filepath.Dir(path), c.mode); err != nil {
					t.Fatal(err)
				}
			}
			e := Endpoint{Network: NetworkUnix, Path: path}
			agent, host := opts(t, RoleAgent), opts(t, RoleHost)
			agent.Token, host.Token, agent.AllowUIDs = Token{}, Token{}, c.allow
			l, err := Listen(t.Context(), e, agent)
			if c.listen != "" {
				if err == nil || !strings.Contains(err.Error(), c.listen) {
					t.Errorf("%v, want %q", err, c.listen)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			closed(t, l)
			l.start()
			d, err := NewDialer(e, host)
			if err != nil {
				t.Fatal(err)
			}
			err = asUser(t, uid, func() error {
				s, err := d.Dial(ctx10(t))
				if err == nil {
					closed(t, s)
				}
				return err
			})
			if !c.connects(err) {
				t.Error(err)
			}
		})
	}
}

func succeeded(err error) bool { return err == nil }

func refusedUID(err error) bool {
	var refused *RefusedError
	return errors.As(err, &refused) && refused.Remote && refused.Code == RefusedUID
}

// publicDir is a directory that all users can reach.
func publicDir(t *testing.T) string {
	t.Helper()
	top := t.TempDir()
	for dir := top; len(dir) > len(os.TempDir()); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return top
}

// A directory of root is not opened to others through a path that another user chose.
func TestDirectoryOfAnotherPathKeepsItsMode(t *testing.T) {
	const uid = 12345
	for name, path := range map[string]func(t *testing.T, root, theirs string) string{
		"link to a directory of another name": func(t *testing.T, root, theirs string) string {
			return symlink(t, mkdir(t, root, "secret"), filepath.Join(theirs, "fairlead"))
		},
		"link to a directory of our name": func(t *testing.T, root, theirs string) string {
			return symlink(t, mkdir(t, root, "fairlead"), filepath.Join(theirs, "fairlead"))
		},
		"link above the directory": func(t *testing.T, root, theirs string) string {
			mkdir(t, root, "fairlead")
			return filepath.Join(symlink(t, root, filepath.Join(theirs, "x")), "fairlead")
		},
		"directory that others can write to": func(t *testing.T, root, _ string) string {
			dir := mkdir(t, root, "fairlead")
			if err := os.Chmod(root, 0o777); err != nil {
				t.Fatal(err)
			}
			return dir
		},
	} {
		t.Run(name, func(t *testing.T) {
			public := publicDir(t)
			theirs := mkdir(t, public, "theirs")
			if err := os.Chown(theirs, uid, uid); err != nil {
				t.Fatal(err)
			}
			root := mkdir(t, public, "root")
			if err := os.Chmod(root, 0o755); err != nil {
				t.Fatal(err)
			}
			dir := path(t, root, theirs)
			agent := opts(t, RoleAgent)
			agent.AllowUIDs = []uint32{uid}
			l, err := Listen(t.Context(), Endpoint{Network: NetworkUnix, Path: filepath.Join(dir, "s")}, agent)
			if err == nil {
				closed(t, l)
				t.Error("listens there")
			}
			fi, err := os.Stat(dir)
			if err != nil || fi.Mode().Perm() != 0o700 {
				t.Errorf("mode %v, %v", fi.Mode(), err)
			}
		})
	}
}

func mkdir(t *testing.T, in, name string) string {
	t.Helper()
	dir := filepath.Join(in, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func symlink(t *testing.T, target, path string) string {
	t.Helper()
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	return path
}
