// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package engine

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
)

// A directory that mounts give two names, as /run and /var/run in a container, is watched
// by one of them.
func TestDirectoryOfTwoNames(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
	if err := errors.Join(os.Mkdir(one, 0o755), os.Mkdir(two, 0o755)); err != nil {
		t.Fatal(err)
	}
	w, err := fsnotify.NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.Close() }()
	err = kernel.OnThread(func() error {
		if err := errors.Join(
			unix.Unshare(unix.CLONE_NEWNS),
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
			unix.Mount(one, two, "", unix.MS_BIND, ""),
		); err != nil {
			return err
		}
		d := dirs{w: w, watched: make(map[string]fileState), refused: make(map[string]bool), log: func(_ []string, err error) { t.Error(err) }}
		both := []string{filepath.Join(one, "sock"), filepath.Join(two, "sock")}
		if !d.follow(both) || d.follow(both) || len(w.WatchList()) != 1 {
			t.Errorf("watches %q", w.WatchList())
		}
		// The other name is taken when the first is not wanted any more.
		for _, path := range both {
			for range 3 {
				d.follow([]string{path})
			}
			if list := w.WatchList(); len(list) != 1 || list[0] != filepath.Dir(path) || d.follow([]string{path}) {
				t.Errorf("watches %q for %s", list, path)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
