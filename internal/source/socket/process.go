// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
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

// process is what is read of a process in /proc: never its arguments or
// environment, which hold secrets.
type process struct {
	started time.Duration // since boot, suspended time included; rounded down to a tick
	name    string        // of its first thread; an event has that of the thread at work
	exe     string        // "" if it cannot be read
	owner   port.Owner
	detail  string // human-readable

	hasCgroups bool     // they were read
	paths      []string // of its cgroups
}

// procfs reads processes.
type procfs struct {
	root string
	// suspended returns by how much CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC.
	suspended func() time.Duration
}

func newProcfs() procfs { return procfs{"/proc", observer.Suspended} }

// read returns the process that has the pid now, with its cgroups if tree is given.
// All is read through one open directory, so that it is of one process.
func (p procfs) read(pid uint32, tree *cgroup.Tree) (*process, error) {
	dir, err := unix.Open(filepath.Join(p.root, strconv.FormatUint(uint64(pid), 10)), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(dir) }()
	stat, err := cgroup.ReadAt(dir, "stat", maxStat)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	parsed, err := observer.ParseStat(stat)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	q := &process{name: parsed.Name, started: parsed.Started, hasCgroups: tree != nil}
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

// existed reports whether q already had its pid at the time seen of
// CLOCK_MONOTONIC, 0 if unknown. Otherwise the pid was another process's then. It
// can err if the pid was recycled within one tick.
func (p procfs) existed(q *process, seen int64) bool {
	return seen != 0 && q.started <= time.Duration(seen)+p.suspended()
}

// attribution is who a socket belongs to, as far as it is known here.
type attribution struct {
	hints  port.Hints
	owner  port.Owner
	detail string // human-readable
}

// processes attributes sockets. It caches the processes that made them. One
// goroutine uses it.
type processes struct {
	procfs
	tree *cgroup.Tree // nil: cgroups are not known

	batch  map[uint32]*process // by pid, of one batch of events; nil if there is none
	makers map[uint64]maker    // by cookie
}

// maker is the process that made a socket.
type maker struct {
	pid     uint32
	process *process
}

func newProcesses(p procfs, tree *cgroup.Tree) *processes {
	return &processes{procfs: p, tree: tree, batch: make(map[uint32]*process), makers: make(map[uint64]maker)}
}

// beginBatch forgets which process has which pid.
func (ps *processes) beginBatch() { clear(ps.batch) }

// knows reports whether the maker of a socket is known.
func (ps *processes) knows(cookie uint64) bool {
	_, ok := ps.makers[cookie]
	return ok
}

// forget is called when a socket is gone.
func (ps *processes) forget(cookie uint64) { delete(ps.makers, cookie) }

// retain forgets all sockets that are not in keep.
func (ps *processes) retain(keep map[uint64]struct{}) {
	for cookie := range ps.makers {
		if _, ok := keep[cookie]; !ok {
			delete(ps.makers, cookie)
		}
	}
}

// attribute returns where a socket is and who made it.
func (ps *processes) attribute(s *observer.Socket) attribution {
	a := attribution{hints: port.Hints{Cgroup: s.CgroupID}}
	needsCgroups := false
	if ps.tree != nil {
		a.hints.Paths = ps.tree.Path(s.CgroupID)
		needsCgroups = ps.tree.NeedsProcess(s.CgroupID, a.hints.Paths)
	}
	q := ps.maker(s, needsCgroups)
	if q != nil && needsCgroups {
		a.hints.Paths = join(a.hints.Paths, q.paths)
	}
	switch {
	case q != nil:
		a.owner, a.detail = q.owner, q.detail
	case s.PID != 0:
		a.owner, a.detail = owner(s.PID, s.Comm, "")
	case s.Comm != "":
		a.owner = port.Owner{Kind: port.OwnerProcess, Name: s.Comm}
		a.detail = "process of another pid namespace (" + s.Comm + ")"
	default:
		a.detail = "socket of an unknown process"
	}
	return a
}

// maker returns the process that made a socket, with its cgroups if they are
// needed; nil if it cannot be known for certain. A result stays valid while the
// socket exists.
func (ps *processes) maker(s *observer.Socket, cgroups bool) *process {
	if s.PID == 0 {
		return nil
	}
	if m, ok := ps.makers[s.Cookie]; ok && m.pid == s.PID && (m.process.hasCgroups || !cgroups) {
		return m.process
	}
	q, known := ps.batch[s.PID]
	if !known || q != nil && cgroups && !q.hasCgroups {
		tree := ps.tree
		if !cgroups {
			tree = nil
		}
		q, _ = ps.read(s.PID, tree) // nil: it has ended
		ps.batch[s.PID] = q
	}
	if q == nil || !ps.existed(q, s.PIDSeen) {
		return nil
	}
	ps.makers[s.Cookie] = maker{s.PID, q}
	return q
}

// owner describes a process by its pid, its name and its executable, if known.
func owner(pid uint32, name, exe string) (port.Owner, string) {
	id := strconv.FormatUint(uint64(pid), 10)
	detail := "pid " + id + " (" + name + ")"
	if exe != "" {
		detail += ", " + exe
	}
	return port.Owner{Kind: port.OwnerProcess, Name: name, ID: id}, detail
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
