// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

// fileState tells one state of a file from another: a socket made anew has
// another inode, a file written again another time.
type fileState struct {
	exists   bool
	dev, ino uint64
	size     int64
	changed  time.Time
}

func stateOf(path string) fileState {
	fi, err := os.Stat(path)
	if err != nil {
		return fileState{}
	}
	st := fileState{exists: true, size: fi.Size(), changed: fi.ModTime()}
	if sys, ok := fi.Sys().(*syscall.Stat_t); ok {
		st.dev, st.ino = uint64(sys.Dev), sys.Ino //nolint:unconvert // Dev is narrower on some platforms
	}
	return st
}

// Watch says when one of the paths appears, changes or is replaced, against how
// it is when Watch is called; what goes away is no news. The paths, and any of
// their directories, need not exist. wake, which has room for one message, is
// never waited for. The channel returned is closed when ctx has ended and nothing
// runs any more. Where the kernel gives no notifications, as it does when too
// many ask for them, that is logged, and the paths are looked at instead.
func Watch(ctx context.Context, logger *slog.Logger, wake chan<- struct{}, paths ...string) (stopped <-chan struct{}) {
	last := make(map[string]fileState, len(paths))
	for _, p := range paths {
		last[p] = stateOf(p)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := watchFiles(ctx, wake, paths, last); err != nil {
			logger.Warn("files cannot be watched; they are looked at now and then", "paths", paths, "every", lookEvery, "err", err)
			lookAtFiles(ctx, wake, paths, last)
		}
	}()
	return done
}

// lookEvery is the time between two looks where nothing is told.
const lookEvery = 10 * time.Second

// lookAtFiles does by looking what watchFiles is told.
func lookAtFiles(ctx context.Context, wake chan<- struct{}, paths []string, last map[string]fileState) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		compare(wake, paths, last)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Wake sends a message if there is room for it.
func Wake(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// compare wakes if a path is there and is not what it was.
func compare(wake chan<- struct{}, paths []string, last map[string]fileState) {
	for _, p := range paths {
		now := stateOf(p)
		if now != last[p] && now.exists {
			Wake(wake)
		}
		last[p] = now
	}
}

func watchFiles(ctx context.Context, wake chan<- struct{}, paths []string, last map[string]fileState) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch files: %w", err)
	}
	defer func() { _ = w.Close() }()
	watched := make(map[string]fileState)
	for {
		// A directory that appeared below one just before that was watched is
		// found by looking again.
		for moved := true; moved; {
			var err error
			if moved, err = follow(w, watched, paths); err != nil {
				return err
			}
		}
		// What happened before the watch stood is seen here.
		compare(wake, paths, last)
		select {
		case <-ctx.Done():
			return nil
		case _, ok := <-w.Events:
			if !ok {
				return errors.New("watch files: the watcher was closed")
			}
		case err, ok := <-w.Errors:
			if !ok {
				return errors.New("watch files: the watcher was closed")
			}
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return fmt.Errorf("watch files: %w", err)
			}
		}
	}
}

// follow watches, for each path, its directory or the nearest one that exists,
// and the same for what a symbolic link points to; and nothing else. A directory
// that was removed and made again is another one under the same name: watched
// has the one that is meant. It says whether it began to watch anything.
func follow(w *fsnotify.Watcher, watched map[string]fileState, paths []string) (moved bool, err error) {
	want := make(map[string]bool)
	for _, p := range paths {
		want[nearest(filepath.Dir(p))] = true
		if real, err := filepath.EvalSymlinks(p); err == nil {
			want[filepath.Dir(real)] = true
		}
	}
	// An inode number may be used again, so the watcher's own list counts too.
	list := w.WatchList()
	for dir, is := range watched {
		now := stateOf(dir)
		if !want[dir] || now.dev != is.dev || now.ino != is.ino || !slices.Contains(list, dir) {
			_ = w.Remove(dir) // the kernel may have dropped it already
			delete(watched, dir)
		}
	}
	for dir := range want {
		if _, ok := watched[dir]; ok {
			continue
		}
		is := stateOf(dir)
		switch err := w.Add(dir); {
		case err == nil:
			watched[dir], moved = is, true
		case !errors.Is(err, os.ErrNotExist):
			return false, fmt.Errorf("watch %s: %w", dir, err)
		}
	}
	return moved, nil
}

// nearest returns dir, or its nearest ancestor that is a directory, without links.
func nearest(dir string) string {
	for {
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			if fi, err := os.Stat(real); err == nil && fi.IsDir() {
				return real
			}
		}
		up := filepath.Dir(dir)
		if up == dir {
			return dir
		}
		dir = up
	}
}
