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

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/compact"
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
	if q, err := d.read(d.pid, d.seen, nil); err == nil && q.exe != "" && q.had(d.seen) {
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
	now       func() int64 // CLOCK_MONOTONIC
}

func newProcfs() procfs { return procfs{"/proc", observer.Suspended, observer.Now} }

// inProc is what /proc has of a process.
type inProc struct {
	// since is a time of CLOCK_MONOTONIC from which on the process had its pid, up to a tick
	// too early: when it started, if exact, or else a tick before its directory was opened.
	since int64
	exact bool
	exe   string   // "" if it cannot be read
	paths []string // of its cgroups, if a tree was given
}

// tick is to what the kernel rounds when a process started, in nanoseconds.
const tick = int64(10 * time.Millisecond)

// had reports whether the process had its pid at the time seen of CLOCK_MONOTONIC, 0 if
// unknown. Otherwise the pid may have been another process's then. It can err if the pid was
// recycled within one tick.
func (q *inProc) had(seen int64) bool { return seen != 0 && q.since <= seen }

// read returns what /proc has of the process that has the pid now and was seen with it. All
// is read through one open directory, so that it is of one process. With a tree it is the
// cgroups, and when it started only if that is needed to tell whether it had the pid then.
func (p procfs) read(pid uint32, seen int64, tree *cgroup.Tree) (q inProc, err error) {
	dir, err := unix.Open(filepath.Join(p.root, strconv.FormatUint(uint64(pid), 10)), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return q, fmt.Errorf("process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(dir) }()
	q.since = p.now() - tick
	if tree != nil {
		if q.paths, err = cgroup.Process(dir); err != nil {
			return q, fmt.Errorf("process %d: %w", pid, err)
		}
		// One that has ended and is not yet reaped seems to be in the roots, and has no
		// executable.
		if q.since > 0 && q.had(seen) && executable(dir) != "" {
			return q, nil
		}
	}
	parsed, err := readStat(pid, dir)
	if err != nil {
		return q, err
	}
	if tree == nil {
		q.exe = executable(dir)
	} else if parsed.State == 'Z' || parsed.State == 'X' {
		return q, fmt.Errorf("process %d: %w", pid, errEnded)
	}
	q.since, q.exact = int64(parsed.Started-p.suspended()), true
	return q, nil
}

// executable returns the path of a process's executable by its directory, "" if it cannot
// be read.
func executable(dir int) string {
	var link [unix.PathMax]byte
	n, err := unix.Readlinkat(dir, "exe", link[:])
	if err != nil {
		return ""
	}
	return string(link[:n])
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
	makers map[uint64]*process // that made sockets, by cookie
	peak   compact.Peak        // of makers
}

func newProcesses(p procfs, tree *cgroup.Tree) *processes {
	return &processes{procfs: p, tree: tree, batch: make(map[uint32]*process), makers: make(map[uint64]*process)}
}

// beginBatch forgets which process has which pid.
func (ps *processes) beginBatch() { ps.batch = compact.Clear(ps.batch) }

// knows reports whether the maker of a socket is known.
func (ps *processes) knows(cookie uint64) bool {
	_, ok := ps.makers[cookie]
	return ok
}

// forget is called when a socket is gone. Callers may range over makers: that goes on over
// the former map.
func (ps *processes) forget(cookie uint64) {
	delete(ps.makers, cookie)
	if ps.peak.Passed(len(ps.makers)) {
		ps.makers = compact.Map(ps.makers)
	}
}

// retain forgets all sockets that are not in keep.
func (ps *processes) retain(keep map[uint64]struct{}) {
	for cookie := range ps.makers {
		if _, ok := keep[cookie]; !ok {
			ps.forget(cookie)
		}
	}
}

// attribute returns where a socket is and who made it.
func (ps *processes) attribute(s *observer.Socket) attribution {
	a := attribution{hints: port.Hints{Cgroup: s.CgroupID, User: s.UID}}
	needsCgroups := false
	if ps.tree != nil {
		var complete bool
		a.hints.Paths, complete = ps.tree.Paths(s.CgroupID, s.ProcessCgroup)
		needsCgroups = !complete
	}
	q := ps.maker(s, needsCgroups)
	switch {
	case !needsCgroups:
	case q != nil && q.cgroupsAt(s.PIDSeen):
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
	q := ps.makers[s.Cookie]
	if q != nil && q.detail.pid == s.PID && q.detail.name == s.Comm && (q.hasCgroups || !cgroups) {
		return q
	}
	q = ps.batch[s.PID]
	if q == nil || q.detail.name != s.Comm || cgroups && !q.tells(s.PIDSeen) {
		q = &process{owner: owner(s), detail: &description{procfs: ps.procfs, pid: s.PID, name: s.Comm, seen: s.PIDSeen}}
		ps.batch[s.PID] = q
	}
	if cgroups && !q.hasCgroups {
		if in, err := ps.read(s.PID, s.PIDSeen, ps.tree); err == nil {
			q.inProc, q.hasCgroups = in, true
		}
	}
	if cgroups && !q.cgroupsAt(s.PIDSeen) {
		return q // it has ended; another process may hold the socket
	}
	ps.makers[s.Cookie] = q
	return q
}

// tells reports whether what was read of q, if anything, tells who had the pid at the time
// seen.
func (q *process) tells(seen int64) bool { return !q.hasCgroups || q.exact || q.had(seen) }

// cgroupsAt reports whether the cgroups of q were read, and are of the process that had its
// pid at the time seen.
func (q *process) cgroupsAt(seen int64) bool { return q.hasCgroups && q.had(seen) }

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
