// SPDX-License-Identifier: Apache-2.0

package link

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Only a socket gets another mode, whatever has replaced it.
func TestSetModeOfSocketsOnly(t *testing.T) {
	dir := t.TempDir()
	file, socket := filepath.Join(dir, "file"), filepath.Join(dir, "socket")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Chmod(socket, 0o600)); err != nil {
		t.Fatal(err)
	}
	mode := func(path string) fs.FileMode {
		fi, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return fi.Mode().Perm()
	}
	link := filepath.Join(dir, "link")
	for _, to := range []string{file, socket, dir} {
		before := mode(to)
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
		if err := setMode(link, 0o666); err == nil || mode(to) != before {
			t.Errorf("link to %s: %v, mode %o", to, err, mode(to))
		}
		if err := os.Remove(link); err != nil {
			t.Fatal(err)
		}
	}
	if err := setMode(file, 0o666); err == nil || mode(file) != 0o600 {
		t.Errorf("file: %v, mode %o", err, mode(file))
	}
	if err := setMode(socket, 0o666); err != nil || mode(socket) != 0o666 {
		t.Errorf("socket: %v, mode %o", err, mode(socket))
	}
}

// Whoever locks the directory of a socket for containers does not keep it from being made.
func TestListenPacketsTakesNoLock(t *testing.T) {
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := errors.Join(dir.Chmod(0o700), unix.Flock(int(dir.Fd()), unix.LOCK_EX)); err != nil {
		t.Fatal(err)
	}
	l, err := ListenPackets(t.Context(), filepath.Join(dir.Name(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	closed(t, l)
}
