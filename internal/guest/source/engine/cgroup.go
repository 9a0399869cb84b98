// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bufio"
	"bytes"
	"cmp"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
)

// Host is where the kernel shows processes and cgroups.
type Host struct {
	Proc    string // "/proc" if empty
	Cgroup2 string // the cgroup2 mount; found in Proc/self/mountinfo if empty
}

// Cgroup finds the cgroup of a container by its first process. The engine may
// live in another pid namespace (each WSL distribution has its own), so a
// process is only believed if its cgroup names the container: one of names, its
// id or its configured cgroup, must be a component of the path. The cgroup must
// belong to root or to user, as whom the engine runs. The id is 0 where cgroup2
// is not mounted, or does not hold the process.
func (h Host) Cgroup(pid int, user uint32, names ...string) (path string, id uint64, ok bool) {
	if pid <= 0 {
		return "", 0, false
	}
	f, err := os.Open(filepath.Join(h.proc(), strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", 0, false
	}
	defer func() { _ = f.Close() }()
	path, v2 := parseCgroup(f, names)
	if path == "" {
		return "", 0, false
	}
	if uid, found := h.CgroupUser(path); found && uid != 0 && uid != user {
		return "", 0, false
	}
	if v2 {
		id, _ = h.inode(path)
	}
	return path, id, true
}

func (h Host) proc() string { return cmp.Or(h.Proc, "/proc") }

// inode returns the inode of a cgroup2 directory.
func (h Host) inode(path string) (uint64, bool) {
	mount := cmp.Or(h.Cgroup2, cgroup2Mount(h.mountinfo()))
	if mount == "" {
		return 0, false
	}
	st, ok := statOf(filepath.Join(mount, path))
	return st.Ino, ok
}

func (h Host) mountinfo() string { return filepath.Join(h.proc(), "self", "mountinfo") }

// CgroupUser returns the user who owns a cgroup's directory. Where several
// hierarchies have that path, a user other than root wins. found is false if none
// has it.
func (h Host) CgroupUser(path string) (uid uint32, found bool) {
	return userOf(h.mounts(), path)
}

// mounts returns where all hierarchies are mounted whole.
func (h Host) mounts() []string {
	if h.Cgroup2 != "" {
		return []string{h.Cgroup2}
	}
	text, err := os.ReadFile(h.mountinfo())
	if err != nil {
		return nil
	}
	v2, _, _ := cgroup.Mounts(bytes.NewReader(text)) // reading memory does not fail
	v1, _ := cgroup.MountsV1(bytes.NewReader(text))
	return append(v2, v1...)
}

// running returns a function that reports whether a container of these has processes,
// by the cgroup that its engine reported, or else by one with its id in its name. It
// reads the mounts once, and walks through the hierarchies at most once.
func (h Host) running(facts map[string]Fact) func(Fact) bool {
	mounts := h.mounts()
	named := sync.OnceValue(func() map[string][]string { return containerDirs(mounts, facts) })
	return func(f Fact) bool {
		switch {
		case f.Stopped:
			return false
		case f.hasPath():
			return slices.ContainsFunc(mounts, func(mount string) bool { return runsIn(filepath.Join(mount, f.Path), f) })
		}
		return slices.ContainsFunc(named()[f.ID], func(dir string) bool { return runsIn(dir, f) })
	}
}

// hasPath reports whether the container's cgroup is known.
func (f Fact) hasPath() bool { return f.Path != "" && f.Path != "/" }

// runsIn reports whether a directory is a cgroup of a container and has processes.
func runsIn(dir string, f Fact) bool {
	st, ok := statOf(dir)
	return ok && (st.Uid == 0 || st.Uid == f.User) && (f.Cgroup == 0 || st.Ino == f.Cgroup) && cgroup.Populated(dir)
}

// containerDirs returns the directories of cgroups by the container's id in their names,
// for containers whose cgroup is not known. It does not enter what belongs to users
// other than root and those of the engines: they can make any number of cgroups.
func containerDirs(mounts []string, facts map[string]Fact) map[string][]string {
	wanted, users := make(map[string]bool), map[uint32]bool{0: true}
	for _, f := range facts {
		if !f.hasPath() && cgroup.IsContainerID(f.ID) {
			wanted[f.ID], users[f.User] = true, true
		}
	}
	dirs := make(map[string][]string)
	if len(wanted) == 0 {
		return dirs
	}
	for _, mount := range mounts {
		_ = filepath.WalkDir(mount, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				return nil
			}
			if st, ok := statOf(path); !ok || path != mount && !users[st.Uid] {
				return fs.SkipDir
			}
			if id := cgroup.ContainerID(path); wanted[id] {
				dirs[id] = append(dirs[id], path)
			}
			return nil
		})
	}
	return dirs
}

// CgroupUsers answers who owns cgroups without reading the mounts each time.
type CgroupUsers struct {
	host   Host
	mounts atomic.Pointer[[]string]
}

// NewCgroupUsers returns the users of a host's cgroups. Call Refresh before the first
// question.
func NewCgroupUsers(h Host) *CgroupUsers { return &CgroupUsers{host: h} }

// Refresh reads where the hierarchies are mounted.
func (u *CgroupUsers) Refresh() {
	mounts := u.host.mounts()
	u.mounts.Store(&mounts)
}

// Of is Host.CgroupUser with the mounts that Refresh read.
func (u *CgroupUsers) Of(path string) (uid uint32, found bool) {
	mounts := u.mounts.Load()
	if mounts == nil {
		return 0, false
	}
	return userOf(*mounts, path)
}

func userOf(mounts []string, path string) (uid uint32, found bool) {
	for _, mount := range mounts {
		if st, ok := statOf(filepath.Join(mount, path)); ok {
			uid, found = max(uid, st.Uid), true
		}
	}
	return uid, found
}

func statOf(path string) (syscall.Stat_t, bool) {
	var st syscall.Stat_t
	return st, syscall.Stat(path, &st) == nil
}

// SocketUser returns the user who owns an engine's socket, which is the one as
// whom a rootless engine runs; root if that is not known.
func SocketUser(path string) uint32 {
	st, _ := statOf(path)
	return st.Uid
}

// parseCgroup reads /proc/PID/cgroup and returns the path that names the
// container, the cgroup2 one if that does.
func parseCgroup(r io.Reader, names []string) (path string, v2 bool) {
	sc := bufio.NewScanner(io.LimitReader(r, 1<<16))
	for sc.Scan() {
		p, unified, ok := cgroup.ParseLine(sc.Text())
		if !ok {
			continue
		}
		p = containerPath(p, names)
		if p != "" && unified {
			return p, true
		}
		if path == "" {
			path = p
		}
	}
	return path, false
}

// containerPath returns the part of a path that names the container: its first
// process may have gone on into a cgroup of its own, as systemd does. It is "" if
// none does.
func containerPath(path string, names []string) string {
	for p := range cgroup.Ancestors(path) {
		id, last := cgroup.ContainerID(p), p[strings.LastIndexByte(p, '/')+1:]
		for _, n := range names {
			if n != "" && (n == id || n == last) || len(n) > 1 && n[0] == '/' && strings.HasSuffix(p, n) {
				return p
			}
		}
	}
	return ""
}

// cgroup2Mount returns the first cgroup2 mount whose root is the hierarchy's.
func cgroup2Mount(mountinfo string) string {
	f, err := os.Open(mountinfo)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	if whole, _, err := cgroup.Mounts(f); err == nil && len(whole) > 0 {
		return whole[0]
	}
	return ""
}
