// SPDX-License-Identifier: Apache-2.0

//go:build linux

package socket

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/cgroup"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/port"
)

// process is what is known of a process: never its arguments or environment, which hold
// secrets. The first message about a port does not wait for what is in /proc, except
// for the cgroups where they are needed.
type process struct {
	owner  port.Owner
	detail *description

	hasCgroups bool // what follows was read
	inProc
}

// description is the human-readable line about a process. Its executable is read when
// somebody asks for the line.
type description struct {
	procfs
	pid  uint32
	name string
	seen int64 // when it was that process, of CLOCK_MONOTONIC
	text atomic.Pointer[string]
}

func (d *description) String() string {
	if text := d.text.Load(); text != nil {
		return *text
	}
	text := describe(d.pid, d.name)
	if q, err := d.read(d.pid, nil); err == nil && q.exe != "" && d.existed(q.started, d.seen) {
		text += ", " + q.exe
	}
	d.text.Store(&text) // one that has ended does not come back
	return text
}

// Equal implements port.Describer.
func (d *description) Equal(other port.Describer) bool {
	e, ok := other.(*description)
	return ok && e.pid == d.pid && e.name == d.name
}

// procfs reads processes.
type procfs struct {
	root string
	// suspended returns by how much CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC.
	suspended func() time.Duration
}

func newProcfs() procfs { return procfs{"/proc", observer.Suspended} }

// inProc is what /proc has of a process.
type inProc struct {
	started time.Duration // since boot, suspended time included; rounded down to a tick
	exe     string        // "" if it cannot be read
	paths   []string      // of its cgroups, if a tree was given
}

// read returns what /proc has of the process that has the pid now. All is read through
// one open directory, so that it is of one process.
func (p procfs) read(pid uint32, tree *cgroup.Tree) (q inProc, err error) {
	dir, err := unix.Open(filepath.Join(p.root, strconv.FormatUint(uint64(pid), 10)), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return q, fmt.Errorf("process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(dir) }()
	if tree != nil {
		err := q.readCgroups(pid, dir, tree)
		return q, err
	}
	parsed, err := readStat(pid, dir)
	if err != nil {
		return q, err
	}
	q.started = parsed.Started
	var link [unix.PathMax]byte
	if n, err := unix.Readlinkat(dir, "exe", link[:]); err == nil {
		q.exe = string(link[:n])
	}
	return q, nil
}

// readStat reads the state of a process by its directory.
func readStat(pid uint32, dir int) (observer.Stat, error) {
	stat, err := cgroup.ReadAt(dir, "stat", maxStat)
	if err != nil {
		return observer.Stat{}, fmt.Errorf("process %d: %w", pid, err)
	}
	parsed, err := observer.ParseStat(stat)
	if err != nil {
		return observer.Stat{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return parsed, nil
}

const maxStat = 4096

var errEnded = errors.New("process has ended")

// readCgroups reads the cgroups of a process by its directory. One that has ended and
// is not yet reaped seems to be in the roots, so its state is read afterwards, and when it
// started with that.
func (q *inProc) readCgroups(pid uint32, dir int, tree *cgroup.Tree) error {
	paths, err := tree.Process(dir)
	if err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	parsed, err := readStat(pid, dir)
	if err != nil {
		return err
	}
	if parsed.State == 'Z' || parsed.State == 'X' {
		return fmt.Errorf("process %d: %w", pid, errEnded)
	}
	q.started, q.paths = parsed.Started, paths
	return nil
}

// existed reports whether a process that started then already had its pid at the time
// seen of CLOCK_MONOTONIC, 0 if unknown. Otherwise the pid was another process's then.
// It can err if the pid was recycled within one tick.
func (p procfs) existed(started time.Duration, seen int64) bool {
	return seen != 0 && started <= time.Duration(seen)+p.suspended()
}

// attribution is who a socket belongs to, as far as it is known here.
type attribution struct {
	hints  port.Hints
	owner  port.Owner
	detail port.Detail
	// missed: the cgroups are needed and the process ended before they were read.
	missed bool
}

// processes attributes sockets. It caches the processes that made them. One
// goroutine uses it.
type processes struct {
	procfs
	tree *cgroup.Tree // nil: cgroups are not known

	batch  map[uint32]*process // by pid, of one batch of events
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
	switch {
	case !needsCgroups:
	case q != nil && ps.cgroupsOf(q, s):
		a.hints.Paths = join(a.hints.Paths, q.paths)
	default:
		a.missed = s.PID != 0
	}
	switch {
	case q != nil:
		a.owner, a.detail = q.owner, port.LazyDetail(q.detail)
	case s.PID != 0:
		a.owner, a.detail = owner(s), port.NewDetail(describe(s.PID, s.Comm))
	case s.Comm != "":
		a.owner = owner(s)
		a.detail = port.NewDetail("process of another pid namespace (" + s.Comm + ")")
	default:
		a.detail = port.NewDetail("socket of an unknown process")
	}
	return a
}

// maker returns the process that made a socket, with its cgroups if they are needed and
// can be read; nil if it is not known when it had its pid. A result stays valid while the
// socket exists.
func (ps *processes) maker(s *observer.Socket, cgroups bool) *process {
	if s.PID == 0 || s.PIDSeen == 0 {
		return nil
	}
	if m, ok := ps.makers[s.Cookie]; ok && m.pid == s.PID && m.process.owner.Name == s.Comm && (m.process.hasCgroups || !cgroups) {
		return m.process
	}
	q := ps.batch[s.PID]
	if q == nil || q.detail.name != s.Comm {
		q = &process{owner: owner(s), detail: &description{procfs: ps.procfs, pid: s.PID, name: s.Comm, seen: s.PIDSeen}}
		ps.batch[s.PID] = q
	}
	if cgroups && !q.hasCgroups {
		if in, err := ps.read(s.PID, ps.tree); err == nil {
			q.inProc, q.hasCgroups = in, true
		}
	}
	if cgroups && !ps.cgroupsOf(q, s) {
		return q // it has ended; another process may hold the socket
	}
	ps.makers[s.Cookie] = maker{s.PID, q}
	return q
}

// cgroupsOf reports whether the cgroups of q were read, and are of the process that made
// the socket.
func (ps *processes) cgroupsOf(q *process, s *observer.Socket) bool {
	return q.hasCgroups && ps.existed(q.started, s.PIDSeen)
}

// owner is the process of a socket as an owner. One of another pid namespace has no number
// here.
func owner(s *observer.Socket) port.Owner {
	o := port.Owner{Kind: port.OwnerProcess, Name: s.Comm}
	if s.PID != 0 {
		o.ID = strconv.FormatUint(uint64(s.PID), 10)
	}
	return o
}

// describe writes a process by its pid and name.
func describe(pid uint32, name string) string {
	return "pid " + strconv.FormatUint(uint64(pid), 10) + " (" + name + ")"
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
