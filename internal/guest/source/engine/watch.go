// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/port/schedule"
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
	watcher func() (*fsnotify.Watcher, error)
	pause   time.Duration // between two looks at what the kernel does not notify of

	mu       sync.Mutex
	watching *watching // nil while nobody watches; guarded by mu, with its watches
}

// watching is the work of one goroutine, from the first watch to the last.
type watching struct {
	watches map[*fileWatch]struct{}
	changed schedule.Signal // the watches are others
	end     context.CancelFunc
	ended   chan struct{}
}

// NewFiles returns a Files. It starts nothing before the first Watch.
func NewFiles(log *slog.Logger) *Files {
	return &Files{log: log, watcher: fsnotify.NewWatcher, pause: 10 * time.Second}
}

// For returns f for files like these, or one of their own: if f is nil, and if a user has one
// of them, who could make all that share f slow.
func (f *Files) For(log *slog.Logger, paths ...string) *Files {
	if f == nil || slices.ContainsFunc(paths, privilege.OfUser) {
		return NewFiles(log)
	}
	return f
}

// fileWatch is what one Watch asked for.
type fileWatch struct {
	wake  schedule.Signal
	paths []string
	last  map[string]fileState // as they were; of the goroutine that looks
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
	if f.watching == nil {
		run, end := context.WithCancel(context.WithoutCancel(ctx))
		l := &watching{make(map[*fileWatch]struct{}), schedule.NewSignal(), end, make(chan struct{})}
		f.watching = l
		go func() {
			defer close(l.ended)
			f.run(run, l)
		}()
	}
	l := f.watching
	l.watches[w] = struct{}{}
	l.changed.Notify()
	done := make(chan struct{})
	context.AfterFunc(ctx, func() {
		defer close(done)
		f.remove(l, w)
	})
	return done
}

// remove ends a watch, and with the last one the goroutine that looks.
func (f *Files) remove(l *watching, w *fileWatch) {
	f.mu.Lock()
	delete(l.watches, w)
	last := len(l.watches) == 0
	if last {
		f.watching = nil
	}
	f.mu.Unlock()
	if !last {
		l.changed.Notify()
		return
	}
	l.end()
	<-l.ended
}

const (
	// eventPause is between two looks at the paths: a user may own the directory of a socket,
	// and change it at any rate.
	eventPause = 20 * time.Millisecond
	// followTries bounds how often directories are looked for that come and go meanwhile.
	followTries = 100
)

// run looks at the paths until ctx ends: after notifications, or now and then while there are
// none.
func (f *Files) run(ctx context.Context, l *watching) {
	for said := ""; ; {
		err := f.notified(ctx, l)
		if ctx.Err() != nil {
			return
		}
		if err.Error() != said {
			said = err.Error()
			f.polls(f.paths(l), err)
		}
		f.compare(l)
		if schedule.Sleep(ctx, f.pause) != nil {
			return
		}
	}
}

// notified looks at the paths after each notification, until ctx ends or there are no more.
func (f *Files) notified(ctx context.Context, l *watching) error {
	w, err := f.watcher()
	if err != nil {
		return err
	}
	// The library holds its lock until somebody takes an error.
	doubt, failed := schedule.NewSignal(), make(chan error, 1)
	var taking sync.WaitGroup
	defer taking.Wait()
	defer func() { _ = w.Close() }()
	taking.Go(func() {
		for err := range w.Errors {
			if errors.Is(err, fsnotify.ErrEventOverflow) {
				doubt.Notify()
				continue
			}
			select {
			case failed <- err:
			default:
			}
		}
	})
	d := dirs{w: w, watched: make(map[string]fileState), refused: make(map[string]bool), log: f.polls}
	for {
		// A directory that appeared below one just before that was watched is
		// found by looking again.
		moved := true
		for try := 0; moved && try < followTries && ctx.Err() == nil; try++ {
			moved = d.follow(f.paths(l))
		}
		// This sees what happened before the watch was in place.
		f.compare(l)
		var again <-chan time.Time
		if moved || len(d.refused) > 0 {
			again = time.After(f.pause)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-failed:
			return err
		case <-l.changed:
		case <-doubt:
		case <-again:
		case <-w.Events:
			_ = schedule.Sleep(ctx, eventPause)
		}
	}
}

func (f *Files) polls(paths []string, err error) {
	f.log.Warn("cannot watch files; polling them", "paths", paths, "interval", f.pause, "err", err)
}

// list returns the watches.
func (f *Files) list(l *watching) []*fileWatch {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Keys(l.watches))
}

// paths returns those of all watches.
func (f *Files) paths(l *watching) (all []string) {
	for _, w := range f.list(l) {
		all = append(all, w.paths...)
	}
	return all
}

// compare notifies those of whose paths one exists and is not in the state that it was in.
func (f *Files) compare(l *watching) {
	for _, w := range f.list(l) {
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
	refused map[string]bool                 // those that exist and cannot be watched
	log     func(paths []string, err error) // is told of each of these once
}

// follow watches, for each path, its directory or the nearest one that exists,
// and the same for what a symbolic link points to; and nothing else. A directory
// that was removed and made again is another one under the same name: watched
// has its identity. It reports whether there is more to follow: it began to watch
// something, or something went away meanwhile.
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
	// The watcher knows a directory by one name, though mounts can give it more.
	type inode struct{ dev, ino uint64 }
	known := make(map[inode]bool)
	for dir, is := range d.watched {
		now := stateOf(dir)
		if !want[dir] || now.dev != is.dev || now.ino != is.ino || !slices.Contains(list, dir) {
			_ = d.w.Remove(dir) // the kernel may have dropped it already
			delete(d.watched, dir)
			continue
		}
		known[inode{is.dev, is.ino}] = true
	}
	maps.DeleteFunc(d.refused, func(dir string, _ bool) bool { return !want[dir] })
	for dir := range want {
		is := stateOf(dir)
		if known[inode{is.dev, is.ino}] {
			delete(d.refused, dir)
			continue
		}
		switch err := d.w.Add(dir); {
		case err == nil:
			d.watched[dir], moved = is, true
			known[inode{is.dev, is.ino}] = true
			delete(d.refused, dir)
		case errors.Is(err, os.ErrNotExist):
			moved = true
		case !d.refused[dir]:
			d.refused[dir] = true
			d.log([]string{dir}, err)
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
