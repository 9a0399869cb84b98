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

// Files are read when they have not changed for quiet, or patience after the first change.
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

// Watch reloads the configuration when one of its files changes, and when hup
// receives, until ctx ends. It calls onChange, one call at a time, with the new
// configuration, or with the error for which the current one is kept. Load is
// LoadAgent or LoadHost with the arguments of the start. Hup is notified of SIGHUP; it
// may be nil.
//
// Watch watches the directories of the files, to notice a rename over a file and the
// replacement of a symbolic link (as Kubernetes does). A file that becomes empty or is
// removed is an error, unless hup confirms it: it is more likely half written than
// meant to restore the defaults. A policy is no such file: what becomes of it never keeps
// the rest from taking effect.
//
// Watch blocks and owns its goroutines. If files cannot be watched it reports that once
// through onChange, and uses hup only.
func Watch[C Config](ctx context.Context, current C, hup <-chan os.Signal, load func() (C, error), onChange func(C, error)) {
	good := current.read() // of the current configuration
	seen := good           // at the last check
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
	var errs chan error // such as an overflow: something changed
	if w, err := fsnotify.NewWatcher(); err == nil {
		defer func() { _ = w.Close() }()
		dirs, events, errs = &dirWatch{w}, w.Events, w.Errors
	} else {
		var none C
		onChange(none, fmt.Errorf("watch configuration files: %w", err))
	}

	// Check at the beginning: current may be older than the watch.
	settle := time.NewTimer(0)
	defer settle.Stop()
	var since time.Time // of the first event not yet handled
	for {
		select {
		case <-ctx.Done():
			return
		case <-events:
			since = putOff(settle, since)
		case <-errs: //nolint:errcheck // an event was lost, whatever the reason
			since = putOff(settle, since)
		case <-hup:
			reload()
			dirs.set(seen)
		case <-settle.C:
			since = time.Time{}
			dirs.set(seen) // first, so that no change after the check is missed
			now := look(seen)
			if slices.Equal(now, seen) {
				continue
			}
			if path := emptied(good, now); path != "" {
				seen = now
				var none C
				onChange(none, fmt.Errorf("%s: empty or removed; keeping the previous configuration", path))
				continue
			}
			reload()
			if dirs.set(seen) {
				settle.Reset(0)
			}
		}
	}
}

// putOff restarts the timer, but not beyond patience. It returns the time of the first
// event.
func putOff(settle *time.Timer, since time.Time) time.Time {
	now := time.Now()
	if since.IsZero() {
		since = now
	}
	settle.Reset(min(quiet, max(0, patience-now.Sub(since))))
	return since
}

// look reads the files.
func look(files []file) []file {
	now := make([]file, len(files))
	for i, f := range files {
		data, err := ReadFile(f.path)
		now[i] = newFile(f.path, data, err, f.apart)
	}
	return now
}

// emptied returns a file that had content before and has none now, of those that the
// configuration depends on.
func emptied(before, now []file) string {
	for _, b := range before {
		for _, n := range now {
			if b.path == n.path && !b.apart && !b.empty && n.empty {
				return n.path
			}
		}
	}
	return ""
}

// dirWatch watches the directories of files.
type dirWatch struct{ w *fsnotify.Watcher }

// set watches the directories of the files and no others, and reports whether it added
// one. If a directory does not exist, its nearest existing parent is watched.
func (d *dirWatch) set(files []file) (added bool) {
	for d != nil && d.add(files) { // again: a directory may have been created meanwhile
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
