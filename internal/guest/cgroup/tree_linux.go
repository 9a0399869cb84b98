// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// maxNames bounds what is remembered; a guest can make as many cgroups as it likes.
const maxNames = 1024

// kernfsHandle is the type of a file handle that is an id (FILEID_KERNFS of
// the kernel's name_to_handle_at).
const kernfsHandle = 0xfe

// V1 names the cgroup that a process has in the hierarchies of cgroup v1. The zero value is
// an unknown one.
type V1 struct {
	Hierarchy uint32 // number of one, as in /proc/PID/cgroup; 0 in the root of all
	ID        uint64 // of the directory in it; 1 in the root of all
}

// hierarchy is one as it is mounted whole.
type hierarchy struct {
	mount string
	dir   *os.File // of its root
	top   string   // path below mount of what is the root to this process: not "" in a cgroup namespace
}

// Tree is the hierarchies as this machine mounts them. It is safe for
// concurrent use.
type Tree struct {
	proc    string
	v1      bool                 // there are others than the unified one
	mounted map[uint32]hierarchy // by number, 0 for the unified one

	mu    sync.Mutex
	names map[V1]name
}

// name is what was found of a cgroup.
type name struct {
	paths []string // one, or none for a root and for one outside of the cgroup namespace
	known bool
}

// Open looks for the hierarchies under proc ("/proc" if empty). Where there is no
// unified one, no id has a path, which is no error. Close it.
func Open(proc string) (*Tree, error) {
	if proc == "" {
		proc = "/proc"
	}
	t := &Tree{proc: proc, mounted: make(map[uint32]hierarchy), names: make(map[V1]name)}
	own, err := os.ReadFile(filepath.Join(proc, "self", "cgroup"))
	if err != nil {
		return nil, fmt.Errorf("cgroups: %w", err)
	}
	_, t.v1 = parsePaths(string(own))
	f, err := os.Open(filepath.Join(proc, "self", "mountinfo"))
	if err != nil {
		return nil, fmt.Errorf("cgroups: %w", err)
	}
	defer func() { _ = f.Close() }()
	mounts, err := parseMounts(f)
	if err != nil {
		return nil, fmt.Errorf("cgroups: %w", err)
	}
	for _, m := range mounts {
		number, ok := m.number(string(own))
		if _, again := t.mounted[number]; !ok || again {
			continue
		}
		h := hierarchy{mount: strings.TrimSuffix(m.path, "/")}
		if h.top, ok = m.top(); !ok {
			continue
		}
		if h.dir, err = os.Open(m.path); err == nil {
			t.mounted[number] = h
		}
	}
	return t, nil
}

// top returns where below a mount the root of the cgroup namespace is. That of a namespace
// that this process is not in the root of is not found.
func (m *mountPoint) top() (path string, ok bool) {
	levels, ok := m.above()
	if !ok || levels == 0 {
		return "", ok
	}
	pid := []byte(strconv.Itoa(os.Getpid()))
	dirs, _ := filepath.Glob(m.path + strings.Repeat("/*", levels) + "/cgroup.procs")
	for _, procs := range dirs {
		text, err := os.ReadFile(procs)
		if err == nil && slices.ContainsFunc(bytes.Fields(text), func(b []byte) bool { return bytes.Equal(b, pid) }) {
			return strings.TrimPrefix(filepath.Dir(procs), strings.TrimSuffix(m.path, "/")), true
		}
	}
	return "", false
}

// HasV1 reports whether controllers have hierarchies of cgroup v1, by a /proc.
func HasV1(proc string) bool {
	own, err := os.ReadFile(filepath.Join(proc, "self", "cgroup"))
	_, v1 := parsePaths(string(own))
	return err == nil && v1
}

// Close closes what the tree holds open.
func (t *Tree) Close() error {
	var errs []error
	for _, h := range t.mounted {
		errs = append(errs, h.dir.Close())
	}
	return errors.Join(errs...)
}

// Paths returns the cgroups of a socket, as /proc/PID/cgroup would name them but without roots:
// its own in the unified hierarchy, by the id, and that of its process in those of cgroup v1.
// The slice is shared.
//
// complete is false if the process may be in others as well, which /proc tells: an id is
// unknown, or has no path, because the cgroup is gone, its hierarchy is not mounted, or the
// kernel refuses to tell (it needs CAP_DAC_READ_SEARCH).
func (t *Tree) Paths(id uint64, process V1) (paths []string, complete bool) {
	paths, complete = t.path(V1{ID: id})
	if !t.v1 {
		return paths, complete
	}
	other, ok := t.path(process)
	if len(other) > 0 && !slices.Contains(paths, other[0]) {
		paths = append(slices.Clip(paths), other[0])
	}
	return paths, complete && ok
}

// path returns the path of a cgroup by its id, none for a root, and whether it is known.
//
// The kernel never gives an id twice, so what was once found stays true. Only cgroup v1 allows
// that a cgroup is renamed, which nobody does.
func (t *Tree) path(id V1) (paths []string, ok bool) {
	h, mounted := t.mounted[id.Hierarchy]
	switch {
	case id.ID == rootID:
		return nil, true
	case id.ID == 0 || !mounted:
		return nil, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if n, ok := t.names[id]; ok {
		return n.paths, n.known
	}
	path, known, err := t.find(h, id.ID)
	if err != nil && !errors.Is(err, unix.ESTALE) {
		return nil, false // it may succeed another time
	}
	if path != "" {
		paths = []string{path}
	}
	if len(t.names) >= maxNames {
		clear(t.names)
	}
	t.names[id] = name{paths, known}
	return paths, known
}

// find returns the path of a cgroup, "" for the root and for one outside of the cgroup
// namespace, and whether the kernel knows it.
func (t *Tree) find(h hierarchy, id uint64) (path string, known bool, err error) {
	b := binary.NativeEndian.AppendUint64(nil, id)
	fd, err := unix.OpenByHandleAt(int(h.dir.Fd()), unix.NewFileHandle(kernfsHandle, b), unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return "", false, fmt.Errorf("cgroup %d: %w", id, err)
	}
	defer func() { _ = unix.Close(fd) }()
	full, err := os.Readlink(filepath.Join(t.proc, "self", "fd", strconv.Itoa(fd)))
	if err != nil {
		return "", false, fmt.Errorf("cgroup %d: %w", id, err)
	}
	below, ok := within(strings.TrimSuffix(full, " (deleted)"), h.mount)
	if !ok {
		return "", false, nil // not below what is mounted here
	}
	below, _ = within(below, h.top)
	return below, true, nil
}

// within returns a path relative to a directory that it is in, with the slash.
func within(path, dir string) (rest string, ok bool) {
	rest, ok = strings.CutPrefix(path, dir)
	if !ok || rest != "" && rest[0] != '/' {
		return "", false
	}
	return rest, true
}

// rootID is the id of the root of each kernfs.
const rootID = 1

// Process returns the cgroups of a process by its directory in /proc, but the
// roots, that of the unified hierarchy first.
func Process(dirfd int) ([]string, error) {
	text, err := ReadAt(dirfd, "cgroup", maxProcFile)
	if err != nil {
		return nil, err
	}
	paths, _ := parsePaths(string(text))
	return paths, nil
}

// maxProcFile bounds a file of /proc/PID.
const maxProcFile = 64 << 10

// ReadAt reads a file of at most limit bytes in a directory. A directory of
// /proc/PID that is open stays that of the same process, even if the number is used again.
func ReadAt(dirfd int, name string, limit int64) ([]byte, error) {
	fd, err := unix.Openat(dirfd, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	// Not an os.File: it would ask to be polled, for each event of a socket.
	b := make([]byte, 0, 512)
	for {
		n, err := unix.Read(fd, b[len(b):min(int64(cap(b)), limit)])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, &os.PathError{Op: "read", Path: name, Err: err}
		}
		b = b[:len(b)+n]
		if n == 0 || int64(len(b)) == limit {
			return b, nil
		}
		if len(b) == cap(b) {
			b = slices.Grow(b, cap(b))
		}
	}
}
