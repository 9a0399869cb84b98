// SPDX-License-Identifier: Apache-2.0

// Package cgroup finds the cgroup of a socket or a process, and the container that
// a cgroup's path names.
package cgroup

import (
	"fmt"
	"io"
	"iter"
	"slices"
	"strconv"
	"strings"
)

// Ancestors yields a path and those above it, the deepest first, without the root.
func Ancestors(path string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for path != "" && path != "/" {
			if !yield(path) {
				return
			}
			path = path[:max(strings.LastIndexByte(path, '/'), 0)]
		}
	}
}

// ContainerID returns the container's id in the last name of a cgroup's path:
// "ID", "docker-ID.scope", "cri-containerd-ID.scope", "slice:prefix:ID". It is ""
// for everything but a generated id: a name that a person chose could be any
// directory's. Whoever may make a cgroup may give it such a name, so the owner of
// the directory matters, too.
func ContainerID(path string) string {
	name := strings.TrimSuffix(path[strings.LastIndexByte(path, '/')+1:], ".scope")
	if id := name[strings.LastIndexAny(name, "-:")+1:]; IsContainerID(id) {
		return id
	}
	return ""
}

// IsContainerID reports whether s is 64 hexadecimal digits.
func IsContainerID(s string) bool {
	return len(s) == 64 && !strings.ContainsFunc(s, func(c rune) bool {
		return (c < '0' || c > '9') && (c < 'a' || c > 'f')
	})
}

// MayBeContainer reports whether a path may be the cgroup of a container whose id
// its user chose, as "/default/redis" of containerd. The names that systemd gives have
// suffixes, and those of its units are never below others without one.
func MayBeContainer(path string) bool {
	first, rest, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return rest != "" && !strings.HasSuffix(first, ".slice") && !strings.HasSuffix(first, ".scope") && !strings.HasSuffix(first, ".service")
}

// ParseLine parses a line of /proc/PID/cgroup (cgroups(7)). v2 reports whether it
// is of the unified hierarchy. ok is false for a hierarchy without a controller,
// because users may make cgroups there, and for a path outside the reader's cgroup
// namespace, because it names nothing here.
func ParseLine(line string) (path string, v2, ok bool) {
	hierarchy, rest, ok1 := strings.Cut(line, ":")
	controllers, path, ok2 := strings.Cut(rest, ":")
	if !ok1 || !ok2 || strings.HasPrefix(controllers, "name=") || !strings.HasPrefix(path, "/") || strings.Contains(path+"/", "/../") {
		return "", false, false
	}
	return strings.TrimSuffix(path, " (deleted)"), hierarchy == "0", true
}

// parsePaths returns the different paths of a /proc/PID/cgroup but the root,
// that of the unified hierarchy first, and whether there are others than that.
func parsePaths(text string) (paths []string, v1 bool) {
	unified := ""
	for line := range strings.Lines(text) {
		path, v2, ok := ParseLine(strings.TrimSuffix(line, "\n"))
		if !ok {
			continue
		}
		v1 = v1 || !v2
		switch {
		case path == "/":
		case v2:
			unified = path
		case !slices.Contains(paths, path):
			paths = append(paths, path)
		}
	}
	if unified != "" {
		paths = slices.DeleteFunc(paths, func(p string) bool { return p == unified })
		paths = slices.Insert(paths, 0, unified)
	}
	return paths, v1
}

// Mounts returns where the unified hierarchy is mounted, whole or a part of it,
// according to a mountinfo file (proc_pid_mountinfo(5)).
func Mounts(mountinfo io.Reader) (whole, parts []string, err error) {
	mounts, err := parseMounts(mountinfo)
	for _, m := range mounts {
		switch {
		case !m.v2:
		case m.whole():
			whole = append(whole, m.path)
		default:
			parts = append(parts, m.path)
		}
	}
	return whole, parts, err
}

// MountsV1 returns where the hierarchies of cgroup v1 are mounted whole.
func MountsV1(mountinfo io.Reader) (whole []string, err error) {
	mounts, err := parseMounts(mountinfo)
	for _, m := range mounts {
		if !m.v2 && m.whole() {
			whole = append(whole, m.path)
		}
	}
	return whole, err
}

// mountPoint is where a hierarchy of cgroups is mounted.
type mountPoint struct {
	path    string
	root    string   // what of the hierarchy, as the reader's cgroup namespace names it
	v2      bool     // it is the unified one
	options []string // of the hierarchy; those of cgroup v1 have the names of the controllers
}

func parseMounts(mountinfo io.Reader) (mounts []mountPoint, err error) {
	text, err := io.ReadAll(mountinfo)
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	for line := range strings.Lines(string(text)) {
		left, right, ok := strings.Cut(line, " - ")
		fields, of := strings.Fields(left), strings.Fields(right)
		if !ok || len(fields) < 5 || len(of) < 3 || of[0] != "cgroup" && of[0] != "cgroup2" {
			continue
		}
		mounts = append(mounts, mountPoint{unescape.Replace(fields[4]), fields[3], of[0] == "cgroup2", strings.Split(of[2], ",")})
	}
	return mounts, nil
}

// whole reports whether all of the hierarchy is mounted that the cgroup namespace has.
func (m *mountPoint) whole() bool { return m.root == "/" }

// above returns by how many cgroups the mounted one is above the root of the cgroup namespace,
// and whether it is that or above it.
func (m *mountPoint) above() (levels int, ok bool) {
	up := strings.TrimSuffix(m.root, "/")
	levels = strings.Count(up, "/..")
	return levels, len(up) == levels*len("/..")
}

// number returns the number that a hierarchy has in a /proc/PID/cgroup, 0 for the unified
// one. Those without a controller have none, as users may make cgroups there.
func (m *mountPoint) number(text string) (number uint32, ok bool) {
	if m.v2 {
		return 0, true
	}
	for line := range strings.Lines(text) {
		field, rest, _ := strings.Cut(line, ":")
		controllers, _, _ := strings.Cut(rest, ":")
		first, _, _ := strings.Cut(controllers, ",") // a controller is in one hierarchy
		n, err := strconv.ParseUint(field, 10, 32)
		if err == nil && n != 0 && first != "" && !strings.HasPrefix(first, "name=") && slices.Contains(m.options, first) {
			return uint32(n), true
		}
	}
	return 0, false
}
