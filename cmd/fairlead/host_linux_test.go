// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// noSystem is a hostinstall.System on which nothing is done.
type noSystem struct {
	removed []string
	absent  bool // there is no file of the user to remove
	packed  bool // there is a package's unit
}

func (s *noSystem) Run(context.Context, string, ...string) error { return nil }
func (s *noSystem) WriteFile(string, []byte) error               { return nil }
func (s *noSystem) Remove(path string) error {
	if s.absent {
		return fs.ErrNotExist
	}
	s.removed = append(s.removed, path)
	return nil
}

func (s *noSystem) ReadFile(path string) ([]byte, error) {
	there := !s.absent
	if strings.HasPrefix(path, "/usr/lib/") {
		there = s.packed
	}
	if !there {
		return nil, fs.ErrNotExist
	}
	return []byte("# Written by `fairlead host install`; `fairlead host uninstall` removes it.\n"), nil
}

// homeOfUser makes a home for asUser, with directories in it for configuration and state.
func homeOfUser(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	t.Setenv("XDG_CONFIG_HOME", filepath.Join(dir, "config"))
	t.Setenv("XDG_STATE_HOME", filepath.Join(dir, "state"))
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o777)); err != nil { //nolint:gosec // another user writes to it
		t.Fatal(err)
	}
	return dir
}

// asUser calls f as another user than root, whose files are found by the environment.
func asUser(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		defer close(done)
		const nobody = 65534
		if os.Geteuid() == 0 { // of this thread alone
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
				t.Error(errno)
				return
			}
		}
		f()
	}()
	<-done
}

// A host that cannot start because its files have mistakes can be uninstalled.
func TestHostUninstallWithAMistakeInTheConfiguration(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	t.Setenv("XDG_CONFIG_HOME", dir)
	t.Setenv("XDG_STATE_HOME", dir)
	path := filepath.Join(dir, "fairlead", "host.yaml")
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Mkdir(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("no: such\n"), 0o644)); err != nil { //nolint:gosec // another user reads it
		t.Fatal(err)
	}
	asUser(t, func() {
		if _, _, _, err := logon(nil); err == nil || !strings.Contains(err.Error(), "host.yaml:1:1") {
			t.Errorf("the mistake was not found: %v", err)
		}
		for want, s := range map[string]*noSystem{
			"Uninstalled. Configuration":                     {packed: true},
			"for this user.\n":                               {absent: true},
			"`systemctl --user disable --now fairlead-host`": {absent: true, packed: true},
		} {
			var out bytes.Buffer
			c := newUninstall(s)
			c.SetArgs(nil)
			c.SetOut(&out)
			if err := c.ExecuteContext(t.Context()); err != nil || !strings.Contains(out.String(), want) {
				t.Errorf("%q, %v, want %q", &out, err, want)
			}
		}
	})
}
