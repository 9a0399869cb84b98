// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
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

// Tree is the hierarchies as this machine mounts them. It is safe for
// concurrent use.
type Tree struct {
	proc  string
	mount string   // of the unified hierarchy's root, "" if there is none
	dir   *os.File // of that
	v1    bool     // there are other hierarchies, too

	mu    sync.Mutex
	names map[uint64][]string // by id: nil or one path
}

// Open looks for the hierarchies under proc ("/proc" if empty). Where there is no
// unified one, no id has a path, which is no error. Close it.
func Open(proc string) (*Tree, error) {
	if proc == "" {
		proc = "/proc"
	}
	t := &Tree{proc: proc, names: make(map[uint64][]string)}
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
	whole, _, err := Mounts(f)
	if err != nil {
		return nil, fmt.Errorf("cgroups: %w", err)
	}
	for _, m := range whole {
		if d, err := os.Open(m); err == nil {
			t.mount, t.dir = strings.TrimSuffix(m, "/"), d
			break
		}
	}
	return t, nil
}

// Close closes what the tree holds open.
func (t *Tree) Close() error {
	if t.dir == nil {
		return nil
	}
	return t.dir.Close()
}

// Path returns the path of a cgroup2 directory by its id, as /proc/PID/cgroup
// would name it: none for the root, for one that is gone, and where the kernel
// refuses (it needs CAP_DAC_READ_SEARCH). The slice is shared.
//
// The kernel never gives an id twice, so what was once found stays true.
func (t *Tree) Path(id uint64) []string {
	if id == 0 || t.dir == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p, ok := t.names[id]; ok {
		return p
	}
	var paths []string
	path, err := t.find(id)
	if err == nil && path != "" {
		paths = []string{path}
	} else if err != nil && !errors.Is(err, unix.ESTALE) {
		return nil // it may succeed another time
	}
	if len(t.names) >= maxNames {
		clear(t.names)
	}
	t.names[id] = paths
	return paths
}

func (t *Tree) find(id uint64) (string, error) {
	b := binary.NativeEndian.AppendUint64(nil, id)
	fd, err := unix.OpenByHandleAt(int(t.dir.Fd()), unix.NewFileHandle(kernfsHandle, b), unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return "", fmt.Errorf("cgroup %d: %w", id, err)
	}
	defer func() { _ = unix.Close(fd) }()
	full, err := os.Readlink(filepath.Join(t.proc, "self", "fd", strconv.Itoa(fd)))
	if err != nil {
		return "", fmt.Errorf("cgroup %d: %w", id, err)
	}
	rel, ok := strings.CutPrefix(full, t.mount)
	if !ok || rel != "" && rel[0] != '/' {
		return "", nil // not below what is mounted here
	}
	return strings.TrimSuffix(rel, " (deleted)"), nil
}

// NeedsProcess reports whether a socket whose own cgroup has these paths may be
// known better by the cgroups of its process: there is no path, or there are
// hierarchies beside the unified one, in which a socket has no cgroup.
func (t *Tree) NeedsProcess(id uint64, paths []string) bool {
	return t.v1 || len(paths) == 0 && id != rootID
}

// rootID is the id of the root of each kernfs.
const rootID = 1

// Process returns the cgroups of a process by its directory in /proc, but the
// roots, that of the unified hierarchy first.
func (t *Tree) Process(dirfd int) ([]string, error) {
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
