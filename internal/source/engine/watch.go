// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
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

// Files tells when files change. All that ask share one watcher of the kernel's, each of
// which costs 70 KB. It is safe for concurrent use.
type Files struct {
	log     *slog.Logger
	changed schedule.Signal // the watches are others

	mu      sync.Mutex
	watches map[*fileWatch]struct{} // guarded by mu
	end     context.CancelFunc      // of the goroutine that looks, while there are any
	ended   chan struct{}           // closed when it has ended
}

// NewFiles returns a Files. It starts nothing before the first Watch.
func NewFiles(log *slog.Logger) *Files {
	return &Files{log: log, changed: schedule.NewSignal(), watches: make(map[*fileWatch]struct{})}
}

// fileWatch is what one Watch asked for.
type fileWatch struct {
	wake  schedule.Signal
	paths []string
	last  map[string]fileState // as they were when wake was last compared
}

// Watch notifies wake when one of the paths appears, changes or is replaced,
// compared with its state when Watch is called; a removal does not count. The
// paths, and any of their directories, need not exist. The channel returned is
// closed when ctx has ended and nothing runs any more for it. What the kernel does not
// notify of, as when too many programs ask, is logged and polled.
func (f *Files) Watch(ctx context.Context, wake schedule.Signal, paths ...string) (stopped <-chan struct{}) {
	w := &fileWatch{wake: wake, paths: paths, last: make(map[string]fileState, len(paths))}
	for _, p := range paths {
		w.last[p] = stateOf(p)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watches[w] = struct{}{}
	if f.end == nil {
		run, end := context.WithCancel(context.WithoutCancel(ctx))
		ended := make(chan struct{})
		f.end, f.ended = end, ended
		go func() {
			defer close(ended)
			f.run(run)
		}()
	}
	f.changed.Notify()
	done := make(chan struct{})
	context.AfterFunc(ctx, func() {
		defer close(done)
		f.remove(w)
	})
	return done
}

// remove ends a watch, and with the last one the goroutine that looks.
func (f *Files) remove(w *fileWatch) {
	f.mu.Lock()
	delete(f.watches, w)
	ended := f.ended
	if len(f.watches) > 0 {
		ended = nil
		f.changed.Notify()
	} else {
		f.end()
		f.end, f.ended = nil, nil
	}
	f.mu.Unlock()
	if ended != nil {
		<-ended
	}
}

// eventPause is between two looks at the paths: a user may own the directory of a socket,
// and change it at any rate.
const eventPause = 20 * time.Millisecond

// pollInterval is for what the kernel does not notify of.
const pollInterval = 10 * time.Second

// run looks at the paths after each notification, until ctx ends.
func (f *Files) run(ctx context.Context) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		f.polls(err)
		f.poll(ctx)
		return
	}
	defer func() { _ = w.Close() }()
	d := dirs{w: w, watched: make(map[string]fileState), refused: make(map[string]bool), log: f.polls}
	for {
		// A directory that appeared below one just before that was watched is
		// found by looking again.
		for d.follow(f.paths()) {
		}
		// This sees what happened before the watch was in place.
		f.compare()
		var again <-chan time.Time
		if len(d.refused) > 0 {
			again = time.After(pollInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-f.changed:
		case <-again:
		case <-w.Events:
			_ = schedule.Sleep(ctx, eventPause)
		case err := <-w.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				f.polls(err)
				f.poll(ctx)
				return
			}
		}
	}
}

// poll looks at the paths from time to time, until ctx ends.
func (f *Files) poll(ctx context.Context) {
	for {
		f.compare()
		if schedule.Sleep(ctx, pollInterval) != nil {
			return
		}
	}
}

func (f *Files) polls(err error) {
	f.log.Warn("cannot watch files; polling them", "interval", pollInterval, "err", err)
}

// paths returns those of all watches.
func (f *Files) paths() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []string
	for w := range f.watches {
		all = append(all, w.paths...)
	}
	return all
}

// compare notifies those of whose paths one exists and is not in the state that it was in.
func (f *Files) compare() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for w := range f.watches {
		for _, p := range w.paths {
			now := stateOf(p)
			if now != w.last[p] && now.exists {
				w.wake.Notify()
			}
			w.last[p] = now
		}
	}
}

// dirs are the directories that a watcher watches.
type dirs struct {
	w       *fsnotify.Watcher
	watched map[string]fileState
	refused map[string]bool // those that exist and cannot be watched
	log     func(error)     // is told of each of these once
}

// follow watches, for each path, its directory or the nearest one that exists,
// and the same for what a symbolic link points to; and nothing else. A directory
// that was removed and made again is another one under the same name: watched
// has its identity. It reports whether it began to watch anything.
func (d *dirs) follow(paths []string) (moved bool) {
	want := make(map[string]bool)
	for _, p := range paths {
		want[nearest(filepath.Dir(p))] = true
		if real, err := filepath.EvalSymlinks(p); err == nil {
			want[filepath.Dir(real)] = true
		}
	}
	// An inode number may be used again, so the watcher's own list counts too.
	list := d.w.WatchList()
	for dir, is := range d.watched {
		now := stateOf(dir)
		if !want[dir] || now.dev != is.dev || now.ino != is.ino || !slices.Contains(list, dir) {
			_ = d.w.Remove(dir) // the kernel may have dropped it already
			delete(d.watched, dir)
		}
	}
	maps.DeleteFunc(d.refused, func(dir string, _ bool) bool { return !want[dir] })
	for dir := range want {
		if _, ok := d.watched[dir]; ok {
			continue
		}
		is := stateOf(dir)
		switch err := d.w.Add(dir); {
		case err == nil:
			d.watched[dir], moved = is, true
			delete(d.refused, dir)
		case !errors.Is(err, os.ErrNotExist) && !d.refused[dir]:
			d.refused[dir] = true
			d.log(fmt.Errorf("watch %s: %w", dir, err))
		}
	}
	return moved
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
