// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/cgroup"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/port"
)

// process is what /proc tells of a process: never its arguments or environment,
// which hold secrets.
type process struct {
	started time.Duration // since boot, suspended time included; rounded down to a tick
	name    string        // of its first thread; an event knows the thread that made it
	exe     string        // "" if it cannot be read
	owner   port.Owner    // it, as what it makes is given it
	detail  string        // it, for people
	asked   bool          // whether its cgroups were
	paths   []string      // those
}

// tick is the unit of time in /proc (USER_HZ).
const tick = time.Second / 100

// procfs reads processes.
type procfs struct {
	root string
	// suspended returns by how much CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC.
	suspended func() time.Duration
}

func newProcfs() procfs { return procfs{"/proc", suspended} }

func suspended() time.Duration {
	var boot, mono unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil || unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono) != nil {
		return 0
	}
	return time.Duration(boot.Nano() - mono.Nano())
}

// look returns what is known of the process that has the number now, with its
// cgroups if tree is given. All is read through one open directory, so that it is
// of one process.
func (p procfs) look(pid uint32, tree *cgroup.Tree) (*process, error) {
	dir, err := unix.Open(filepath.Join(p.root, strconv.FormatUint(uint64(pid), 10)), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(dir) }()
	stat, err := cgroup.ReadAt(dir, "stat", maxStat)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	q := &process{asked: tree != nil}
	if q.name, q.started, err = parseStat(stat); err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	var link [unix.PathMax]byte
	if n, err := unix.Readlinkat(dir, "exe", link[:]); err == nil {
		q.exe = string(link[:n])
	}
	if tree != nil {
		q.paths, _ = tree.Process(dir) // it may have ended meanwhile
	}
	q.owner, q.detail = owner(pid, q.name, q.exe)
	return q, nil
}

const maxStat = 4096

var errStat = errors.New("not a stat file as in proc_pid_stat(5)")

func parseStat(b []byte) (name string, started time.Duration, err error) {
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return "", 0, errStat
	}
	field := 3 // behind the name
	for f := range bytes.FieldsSeq(b[end+1:]) {
		if field == 22 {
			ticks, err := strconv.ParseInt(string(f), 10, 64)
			if err != nil {
				return "", 0, errStat
			}
			return string(b[open+1 : end]), time.Duration(ticks) * tick, nil
		}
		field++
	}
	return "", 0, errStat
}

// was reports whether q is the process that had its number at a time of
// CLOCK_MONOTONIC: numbers are used again, but never by two at a time. It can
// err if the number was used again within one tick.
func (p procfs) was(q *process, seen int64) bool {
	return seen != 0 && q.started <= time.Duration(seen)+p.suspended()
}

// processes keeps what is known of the processes behind sockets. One goroutine
// uses it.
type processes struct {
	procfs
	tree *cgroup.Tree // nil: cgroups are not known

	batch map[uint32]*process // by number, of one batch of events; nil if there is none
	made  map[uint64]maker    // by cookie
}

// maker is who made a socket.
type maker struct {
	pid     uint32
	process *process
}

func newProcesses(p procfs, tree *cgroup.Tree) *processes {
	return &processes{procfs: p, tree: tree, batch: make(map[uint32]*process), made: make(map[uint64]maker)}
}

// next begins a batch.
func (ps *processes) next() { clear(ps.batch) }

// knows reports whether the process that made a socket is known.
func (ps *processes) knows(cookie uint64) bool {
	_, ok := ps.made[cookie]
	return ok
}

// forget says that a socket is gone.
func (ps *processes) forget(cookie uint64) { delete(ps.made, cookie) }

// retain forgets all sockets that keep does not hold.
func (ps *processes) retain(keep map[uint64]struct{}) {
	for cookie := range ps.made {
		if _, ok := keep[cookie]; !ok {
			delete(ps.made, cookie)
		}
	}
}

// of returns the process that made a socket, with its cgroups if they are asked
// for; nil if it cannot be known for certain. What was once known stays so while
// the socket lives.
func (ps *processes) of(cookie uint64, pid uint32, seen int64, cgroups bool) *process {
	if pid == 0 {
		return nil
	}
	if m, ok := ps.made[cookie]; ok && m.pid == pid && (m.process.asked || !cgroups) {
		return m.process
	}
	q, known := ps.batch[pid]
	if !known || q != nil && cgroups && !q.asked {
		tree := ps.tree
		if !cgroups {
			tree = nil
		}
		q, _ = ps.look(pid, tree) // nil: it has ended
		ps.batch[pid] = q
	}
	if q == nil || !ps.was(q, seen) {
		return nil
	}
	ps.made[cookie] = maker{pid, q}
	return q
}

// hints returns where the socket is, and the process that made it if that is known.
func (ps *processes) hints(s *observer.Socket) (port.Hints, *process) {
	h := port.Hints{Cgroup: s.CgroupID}
	if ps.tree == nil {
		return h, ps.of(s.Cookie, s.PID, s.PIDSeen, false)
	}
	h.Paths = ps.tree.Path(s.CgroupID)
	ask := ps.tree.NeedsProcess(s.CgroupID, h.Paths)
	q := ps.of(s.Cookie, s.PID, s.PIDSeen, ask)
	if ask && q != nil {
		h.Paths = join(h.Paths, q.paths)
	}
	return h, q
}

// join returns the paths of both, each once.
func join(a, b []string) []string {
	switch {
	case len(a) == 0:
		return b
	case len(b) == 0 || len(b) == 1 && slices.Contains(a, b[0]):
		return a
	}
	out := slices.Clone(a)
	for _, p := range b {
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}
