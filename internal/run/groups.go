// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/cgroup"
)

// slice has the cgroups of the jobs of all helpers, each in a directory that its helper
// has locked. It is named as a slice of systemd, so that no job is taken for a container.
const slice = "fairlead-jobs.slice"

// sliceDir returns the directory of the slice.
func sliceDir() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	whole, _, err := cgroup.Mounts(f)
	if err != nil {
		return "", err
	}
	if len(whole) == 0 {
		return "", errors.New("no unified hierarchy of cgroups (cgroup2) is mounted")
	}
	return filepath.Join(whole[0], slice), nil
}

// groups are the cgroups of all jobs of one helper.
type groups struct {
	dir  string
	lock *os.File // of dir, until the helper ends
	last atomic.Uint64
}

// newGroups makes the directory of this process, and kills what helpers that were killed
// left in theirs.
func newGroups() (*groups, error) {
	dir, err := sliceDir()
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make a cgroup: %w: run the agent as root, under systemd with the drop-in of https://github.com/fairlead/fairlead/blob/main/docs/run.md", err)
	}
	// Whoever can open a directory can lock it, and keep all helpers waiting.
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make a cgroup: %w", err)
	}
	if _, err := os.Stat(filepath.Join(dir, killFile)); err != nil {
		return nil, fmt.Errorf("kill a cgroup: %w: it needs Linux 5.14", err)
	}
	all, err := locked(dir, unix.LOCK_EX)
	if err != nil {
		return nil, err
	}
	defer func() { _ = all.Close() }()
	if err := sweep(dir); err != nil {
		return nil, err
	}
	own, err := os.MkdirTemp(dir, strconv.Itoa(os.Getpid())+".")
	if err != nil {
		return nil, fmt.Errorf("make a cgroup: %w", err)
	}
	lock, err := locked(own, unix.LOCK_EX)
	return &groups{dir: own, lock: lock}, err
}

// locked opens and locks a directory.
func locked(dir string, how int) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), how); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return f, nil
}

// killLeftovers kills and removes all groups of helpers that have ended.
func killLeftovers() error {
	dir, err := sliceDir()
	if err != nil {
		return err
	}
	all, err := locked(dir, unix.LOCK_EX)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no helper made it
	}
	if err != nil {
		return err
	}
	defer func() { _ = all.Close() }()
	return sweep(dir)
}

// sweep is killLeftovers in a slice that is locked.
func sweep(slice string) error {
	helpers, err := os.ReadDir(slice)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range helpers {
		dir := filepath.Join(slice, e.Name())
		if !e.IsDir() {
			continue
		}
		lock, err := locked(dir, unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EWOULDBLOCK): // its helper lives
		case err != nil:
			errs = append(errs, err)
		default:
			errs = append(errs, remove(dir), lock.Close())
		}
	}
	return errors.Join(errs...)
}

// remove kills and removes the groups in a helper's directory, and that itself.
func remove(dir string) error {
	entries, err := os.ReadDir(dir)
	errs := []error{err}
	for _, e := range entries {
		if e.IsDir() {
			errs = append(errs, group(filepath.Join(dir, e.Name())).end())
		}
	}
	return errors.Join(append(errs, group(dir).end())...)
}

// group is the cgroup of one job, by its path.
type group string

// add makes a group.
func (g *groups) add() (group, error) {
	path := filepath.Join(g.dir, strconv.FormatUint(g.last.Add(1), 10))
	return group(path), os.Mkdir(path, 0o700)
}

const (
	killFile = "cgroup.kill"
	// emptyTimeout bounds how long killed processes take to go.
	emptyTimeout = 10 * time.Second
)

// kill kills all processes of the group, also those that are just being made.
func (g group) kill() error {
	err := os.WriteFile(filepath.Join(string(g), killFile), []byte("1"), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// end kills all processes, waits until they are gone, and removes the group.
func (g group) end() error {
	if err := g.kill(); err != nil {
		return err
	}
	pause := time.Millisecond
	for start := time.Now(); ; pause = min(2*pause, 100*time.Millisecond) {
		err := os.Remove(string(g))
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if time.Since(start) > emptyTimeout {
			return fmt.Errorf("remove a job's cgroup: %w", err)
		}
		time.Sleep(pause)
	}
}
