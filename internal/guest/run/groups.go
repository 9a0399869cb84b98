// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/run/policy"
)

// slice has the cgroups of the jobs, in the cgroup of the service: for each helper a directory
// that it has locked. It is named as a slice of systemd, so that no job is taken for a container.
const slice = "fairlead-jobs.slice"

// serviceGroup is for the service itself where its cgroup gives controllers to those below:
// such a cgroup has no processes.
const serviceGroup = "service"

// ownGroup returns the directory of this process's cgroup.
func ownGroup() (string, error) {
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
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			return filepath.Join(whole[0], path), nil
		}
	}
	return "", errors.New("this process is in no cgroup of the unified hierarchy")
}

// prepareSlice makes the slice in this process's cgroup, and gives it the controllers. It
// returns why it cannot have some of them.
func prepareSlice(controllers []string) (dir string, missing map[string]error, err error) {
	own, err := ownGroup()
	if err != nil {
		return "", nil, err
	}
	dir = filepath.Join(own, slice)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", nil, fmt.Errorf("make a cgroup: %w: run fairlead-run as root, under systemd with its unit", err)
	}
	// Whoever can open a directory can lock it, and keep all helpers waiting.
	if err := os.Chmod(dir, 0o700); err != nil {
		return "", nil, fmt.Errorf("make a cgroup: %w", err)
	}
	if _, err := os.Stat(filepath.Join(dir, killFile)); err != nil {
		return "", nil, fmt.Errorf("kill a cgroup: %w: it needs Linux 5.14", err)
	}
	missing = map[string]error{}
	for _, c := range controllers {
		if err := delegate(own, c); err != nil {
			missing[c] = err
		}
	}
	return dir, missing, nil
}

// delegate gives the cgroups below a cgroup and below its slice a controller. This process
// leaves the cgroup if that is needed.
func delegate(own, controller string) error {
	have, err := os.ReadFile(filepath.Join(own, "cgroup.controllers"))
	if err != nil {
		return err
	}
	if !slices.Contains(strings.Fields(string(have)), controller) {
		return fmt.Errorf("%s has no controller %q: its unit needs Delegate=%s", own, controller, controller)
	}
	err = enable(own, controller)
	if errors.Is(err, unix.EBUSY) {
		service := filepath.Join(own, serviceGroup)
		if err := os.Mkdir(service, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := os.WriteFile(filepath.Join(service, "cgroup.procs"), []byte("0"), 0); err != nil {
			return err
		}
		err = enable(own, controller)
	}
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%s has other processes: the service needs a cgroup of its own, as its unit gives it", own)
	}
	if err != nil {
		return err
	}
	return enable(filepath.Join(own, slice), controller)
}

// enable gives the cgroups below one a controller.
func enable(dir, controller string) error {
	return os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0)
}

// groups are the cgroups of all jobs of one helper.
type groups struct {
	dir  string
	lock *os.File // of dir, until the helper ends
	last atomic.Uint64
}

// newGroups makes the directory of this process in the slice, and kills what helpers that were
// killed left in theirs.
func newGroups(slice string, controllers []string) (*groups, error) {
	all, err := locked(slice, unix.LOCK_EX)
	if err != nil {
		return nil, err
	}
	defer func() { _ = all.Close() }()
	if err := sweep(slice, ""); err != nil {
		return nil, err
	}
	own, err := os.MkdirTemp(slice, strconv.Itoa(os.Getpid())+".")
	if err != nil {
		return nil, fmt.Errorf("make a cgroup: %w", err)
	}
	for _, c := range controllers {
		if err := enable(own, c); err != nil {
			return nil, fmt.Errorf("limit jobs: %w", err)
		}
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

// killLeftovers kills and removes the groups of helpers that have ended. The helper with this pid
// has, even if its lock is held: a launcher that it was just starting may hold it for a moment.
func killLeftovers(slice string, ended int) error {
	all, err := locked(slice, unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer func() { _ = all.Close() }()
	return sweep(slice, strconv.Itoa(ended)+".")
}

// sweep is killLeftovers in a slice that is locked. The names of an ended helper's directories
// begin with ended, which is empty if no helper is known to have ended.
func sweep(slice, ended string) error {
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
		case errors.Is(err, unix.EWOULDBLOCK):
			if ended != "" && strings.HasPrefix(e.Name(), ended) {
				errs = append(errs, remove(dir))
			} // else its helper lives
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

// limit bounds what the processes of the group may use together. What goes beyond its memory is
// killed whole; swap is no memory more.
func (g group) limit(e *policy.Entry) error {
	type setting struct{ file, value string }
	var all []setting
	if e.Memory > 0 {
		all = append(all, setting{"memory.max", strconv.FormatInt(e.Memory, 10)}, setting{"memory.oom.group", "1"}, setting{"memory.swap.max", "0"})
	}
	if e.Processes > 0 {
		all = append(all, setting{"pids.max", strconv.Itoa(e.Processes)})
	}
	for _, s := range all {
		err := os.WriteFile(filepath.Join(string(g), s.file), []byte(s.value), 0)
		if err != nil && !(s.file == "memory.swap.max" && errors.Is(err, fs.ErrNotExist)) { // a kernel without swap
			return fmt.Errorf("limit the job: %w", err)
		}
	}
	return nil
}

// outOfMemory reports whether the group was killed for its limit of memory.
func (g group) outOfMemory() bool {
	b, _ := os.ReadFile(filepath.Join(string(g), "memory.events"))
	for line := range strings.Lines(string(b)) {
		if n, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			return n != "0"
		}
	}
	return false
}

const (
	killFile = "cgroup.kill"
	// emptyTimeout bounds how long killed processes take to go.
	emptyTimeout = 10 * time.Second
)

// kill kills all processes of the group, also new ones while it does.
func (g group) kill() error {
	err := os.WriteFile(filepath.Join(string(g), killFile), []byte("1"), 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) { // it was removed
		return nil
	}
	return err
}

// end kills all processes, waits until they are gone, and removes the group, in which no process
// can be made then. One may have been made since others were killed.
func (g group) end() error {
	pause := time.Millisecond
	for start := time.Now(); ; pause = min(2*pause, 100*time.Millisecond) {
		if err := g.kill(); err != nil {
			return err
		}
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
