// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package status

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const otherUID = 12345

// asOther runs f on a thread of another user, which then ends.
func asOther(t *testing.T, f func() error) error {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, otherUID, otherUID, otherUID); errno != 0 {
			done <- errno
			return
		}
		done <- f()
	}()
	return <-done
}

// openDir is a directory that every user can enter.
func openDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; len(d) > len(os.TempDir()); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// The control socket is not made where another user could replace it.
func TestControlDirectoryOfOthersRefused(t *testing.T) {
	for name, prepare := range map[string]func(dir string) error{
		"of another user":  func(dir string) error { return os.Chown(dir, otherUID, otherUID) },
		"writable for all": func(dir string) error { return os.Chmod(dir, 0o777) },
		"link to a directory of another user": func(dir string) error {
			if err := os.Rename(dir, dir+"2"); err != nil {
				return err
			}
			if err := os.Chown(dir+"2", otherUID, otherUID); err != nil {
				return err
			}
			return os.Symlink(dir+"2", dir)
		},
	} {
		dir := filepath.Join(t.TempDir(), "d")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := prepare(dir); err != nil {
			t.Fatal(err)
		}
		l, err := ListenControl(filepath.Join(dir, "s"))
		if err == nil {
			_ = l.Close()
			t.Errorf("directory %s: listens there", name)
		} else if !strings.Contains(err.Error(), dir) {
			t.Errorf("directory %s: %v", name, err)
		}
	}
}

// A socket that another user serves is not asked: it could answer anything.
func TestServerOfAnotherUserRefused(t *testing.T) {
	dir := openDir(t)
	if err := os.Chown(dir, otherUID, otherUID); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	var l net.Listener
	if err := asOther(t, func() (err error) {
		l, err = net.Listen("unix", path)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	_, err := NewClient(path).List(t.Context())
	if err == nil || !strings.Contains(err.Error(), "runs as uid 12345") {
		t.Error(err)
	}
}

// Other users get no answer even if the modes of the socket and its directory let them in.
func TestClientOfAnotherUserRefused(t *testing.T) {
	path := filepath.Join(openDir(t), "s")
	l, err := ListenControl(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error)
	go func() {
		done <- NewServer(Options{Provider: &fakeProvider{}, Logger: slog.New(slog.DiscardHandler)}).Serve(ctx, l, true)
	}()
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := NewClient(path).List(t.Context()); err != nil {
		t.Errorf("our own user: %v", err)
	}
	err = asOther(t, func() error {
		conn, err := net.Dial("unix", path)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err = conn.Write([]byte("GET /v1/ports HTTP/1.1\r\nHost: fairlead\r\n\r\n")); err == nil {
			_, err = conn.Read(make([]byte, 1))
		}
		return err
	})
	if err == nil {
		t.Error("another user got an answer")
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
