// SPDX-License-Identifier: Apache-2.0

package notify

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// programs makes a directory with a notify-send, and PATH that directory alone.
func programs(t *testing.T, script string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if script != "" {
		if err := os.WriteFile(filepath.Join(dir, "notify-send"), []byte("#!/bin/sh\n"+script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	return dir
}

// The program gets title and text as they are, whatever is in them.
func TestShow(t *testing.T) {
	dir := programs(t, `for a; do printf '%s\0' "$a"; done > "${0%/*}/argv"`)
	const text = "80/tcp of $(touch x) `touch x` '; touch x #\n--hint=x"
	if err := Show(t.Context(), "fairlead: a port opened", text); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(dir, "argv"))
	if want := "--app-name=fairlead\x00--\x00fairlead: a port opened\x00" + text + "\x00"; err != nil || string(got) != want {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}

func TestShowFails(t *testing.T) {
	programs(t, "echo 'cannot autolaunch D-Bus' >&2; exit 1")
	if err := Show(t.Context(), "t", "x"); err == nil || !strings.Contains(err.Error(), "exit status 1: cannot autolaunch D-Bus") {
		t.Error(err)
	}
	programs(t, "while :; do echo 0123456789012345678901234567890123456789; done | head -c 100000; exit 1")
	t.Setenv("PATH", os.Getenv("PATH")+":/usr/bin:/bin")
	if err := Show(t.Context(), "t", "x"); err == nil || len(err.Error()) > 2*maxOutput {
		t.Errorf("%d bytes of error", len(err.Error()))
	}
	programs(t, "exec /bin/sleep 600")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := Show(ctx, "t", "x"); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	programs(t, "")
	if err := Available(); err == nil || !strings.Contains(err.Error(), "libnotify") {
		t.Error(err)
	}
}
