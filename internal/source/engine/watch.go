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

	"github.com/fairlead/fairlead/internal/schedule"
)

// fileState identifies one state of a file: a new socket has another inode, a
// file that was written again another time.
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

// Watch notifies wake when one of the paths appears, changes or is replaced,
// compared with its state when Watch is called; a removal does not count. The
// paths, and any of their directories, need not exist. The channel returned is
// closed when ctx has ended and nothing runs any more. Where the kernel gives no
// notifications, because too many programs ask for them, that is logged and the
// paths are polled.
func Watch(ctx context.Context, logger *slog.Logger, wake schedule.Signal, paths ...string) (stopped <-chan struct{}) {
	last := make(map[string]fileState, len(paths))
	for _, p := range paths {
		last[p] = stateOf(p)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := watchFiles(ctx, wake, paths, last); err != nil {
			logger.Warn("cannot watch files; polling them", "paths", paths, "interval", pollInterval, "err", err)
			pollFiles(ctx, wake, paths, last)
		}
	}()
	return done
}

// eventPause is between two looks at the paths: a user may own the directory of a socket,
// and change it at any rate.
const eventPause = 20 * time.Millisecond

// pollInterval is for where the kernel gives no notifications.
const pollInterval = 10 * time.Second

// pollFiles is watchFiles without notifications.
func pollFiles(ctx context.Context, wake schedule.Signal, paths []string, last map[string]fileState) {
	for {
		compare(wake, paths, last)
		if schedule.Sleep(ctx, pollInterval) != nil {
			return
		}
	}
}

// compare notifies wake if a path exists and is not in the state that it was in.
func compare(wake schedule.Signal, paths []string, last map[string]fileState) {
	for _, p := range paths {
		now := stateOf(p)
		if now != last[p] && now.exists {
			wake.Notify()
		}
		last[p] = now
	}
}

func watchFiles(ctx context.Context, wake schedule.Signal, paths []string, last map[string]fileState) error {
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
		// This sees what happened before the watch was in place.
		compare(wake, paths, last)
		select {
		case <-ctx.Done():
			return nil
		case _, ok := <-w.Events:
			if !ok {
				return errors.New("watch files: the watcher was closed")
			}
			_ = schedule.Sleep(ctx, eventPause)
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
// has its identity. It reports whether it began to watch anything.
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
