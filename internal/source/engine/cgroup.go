// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bufio"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/fairlead/fairlead/internal/cgroup"
)

// Host says where the kernel shows processes and cgroups.
type Host struct {
	Proc    string // "/proc" if empty
	Cgroup2 string // the cgroup2 mount; found in Proc/self/mountinfo if empty
}

// Cgroup finds the cgroup of a container by its first process. The engine may
// live in another pid namespace (each WSL distribution has its own), so a
// process is only believed if its cgroup names the container: one of names, its
// id or its configured cgroup, must be a component of the path. The id is 0
// where cgroup2 is not mounted, or does not hold the process.
func (h Host) Cgroup(pid int, names ...string) (path string, id uint64, ok bool) {
	if h.Proc == "" {
		h.Proc = "/proc"
	}
	if pid <= 0 {
		return "", 0, false
	}
	f, err := os.Open(filepath.Join(h.Proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", 0, false
	}
	defer func() { _ = f.Close() }()
	path, v2 := parseCgroup(f, names)
	if path == "" {
		return "", 0, false
	}
	if !v2 {
		return path, 0, true
	}
	if h.Cgroup2 == "" {
		h.Cgroup2 = cgroup2Mount(filepath.Join(h.Proc, "self", "mountinfo"))
	}
	if h.Cgroup2 != "" {
		if fi, err := os.Stat(filepath.Join(h.Cgroup2, path)); err == nil {
			if st, isStat := fi.Sys().(*syscall.Stat_t); isStat {
				id = st.Ino
			}
		}
	}
	return path, id, true
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
