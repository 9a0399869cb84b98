// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
)

// How long the files must be quiet until they are read, and how long that can
// be put off by further changes.
const (
	quiet    = 100 * time.Millisecond
	patience = time.Second
)

// Config is Agent or Host.
type Config interface {
	Agent | Host
	read() []file
}

// read returns the files that the configuration, or the attempt to load it, read.
func (c Common) read() []file { return c.files }

// Watch loads the configuration again when the content of one of its files
// changes, and when hup receives, until ctx ends. It calls onChange, one call at
// a time, with the new configuration, or with the error for which the old one is
// to be kept. Current is what stands; load is LoadAgent or LoadHost with the
// arguments of the start. Hup is what SIGHUP is notified to; it may be nil.
//
// Files are watched through their directories, so that a rename over a file and
// the exchange of a symbolic link (as Kubernetes does it) are seen. A file that
// becomes empty or vanishes is an error, unless hup says that it is meant: it is
// more often half written than an order to fall back to the defaults.
//
// Watch blocks and owns its goroutines. Where files cannot be watched, it says
// so once through onChange and goes on with hup alone.
func Watch[C Config](ctx context.Context, current C, hup <-chan os.Signal, load func() (C, error), onChange func(C, error)) {
	good := current.read() // behind the configuration that stands
	seen := good           // when we last looked
	reload := func() {
		next, err := load()
		seen = next.read()
		if err == nil {
			good = seen
		}
		onChange(next, err)
	}

	var dirs *dirWatch
	var events chan fsnotify.Event
	var errs chan error // an overflow, for one: something changed
	if w, err := fsnotify.NewWatcher(); err == nil {
		defer func() { _ = w.Close() }()
		dirs, events, errs = &dirWatch{w}, w.Events, w.Errors
	} else {
		var none C
		onChange(none, fmt.Errorf("watch configuration files: %w", err))
	}

	// It begins with a look: current may be older than the watch.
	settle := time.NewTimer(0)
	defer settle.Stop()
	var since time.Time // of the first event that was not looked into
	for {
		select {
		case <-ctx.Done():
			return
		case <-events:
			since = putOff(settle, since)
		case <-errs: //nolint:errcheck // that something was missed matters, not what
			since = putOff(settle, since)
		case <-hup:
			reload()
			dirs.set(seen)
		case <-settle.C:
			since = time.Time{}
			dirs.set(seen) // first, so that nothing changes unseen after the look
			now := look(seen)
			if slices.Equal(now, seen) {
				continue
			}
			if path := emptied(good, now); path != "" {
				seen = now
				var none C
				onChange(none, fmt.Errorf("%s: empty or gone, the old configuration stays", path))
				continue
			}
			reload()
			if dirs.set(seen) {
				settle.Reset(0)
			}
		}
	}
}

// putOff waits until no event has come for a while, but not for ever. It returns
// when the first event came.
func putOff(settle *time.Timer, since time.Time) time.Time {
	now := time.Now()
	if since.IsZero() {
		since = now
	}
	settle.Reset(min(quiet, max(0, patience-now.Sub(since))))
	return since
}

// look reads the files again.
func look(files []file) []file {
	now := make([]file, len(files))
	for i, f := range files {
		data, err := readFile(f.path)
		now[i] = newFile(f.path, data, err)
	}
	return now
}

// emptied returns a file that held something before and holds nothing now.
func emptied(before, now []file) string {
	for _, b := range before {
		for _, n := range now {
			if b.path == n.path && !b.empty && n.empty {
				return n.path
			}
		}
	}
	return ""
}

// dirWatch watches the directories that files stand in.
type dirWatch struct{ w *fsnotify.Watcher }

// set watches what the files need and nothing else, and reports whether it added
// a directory. A directory that does not exist is awaited in the nearest one
// that does.
func (d *dirWatch) set(files []file) (added bool) {
	for d != nil && d.add(files) { // once more: a directory may have come up meanwhile
		added = true
	}
	return added
}

func (d *dirWatch) add(files []file) (added bool) {
	var want []string
	for _, f := range files {
		path, err := filepath.Abs(f.path)
		if err != nil {
			continue
		}
		want = append(want, filepath.Dir(path))
		if target, err := filepath.EvalSymlinks(path); err == nil {
			want = append(want, filepath.Dir(target))
		}
	}
	before := d.w.WatchList()
	var keep []string
	for _, dir := range want {
		for {
			keep = append(keep, dir)
			if slices.Contains(before, dir) {
				break
			}
			err := d.w.Add(dir)
			added = added || err == nil
			parent := filepath.Dir(dir)
			if err == nil || parent == dir {
				break
			}
			dir = parent
		}
	}
	for _, dir := range before {
		if !slices.Contains(keep, dir) {
			_ = d.w.Remove(dir)
		}
	}
	return added
}
