// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

var errNoCgroup = errors.New("the root of the cgroup2 hierarchy is not mounted")

// cgroupRoot finds where the root of the cgroup2 hierarchy is mounted. A
// program attached there sees all sockets; one attached below sees a part.
func cgroupRoot() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find cgroup2: %w", err)
	}
	defer func() { _ = f.Close() }()
	mounts, err := cgroupMounts(f)
	if err != nil {
		return "", fmt.Errorf("find cgroup2: %w", err)
	}
	for _, m := range mounts {
		// A mount may show a part of the hierarchy, and a cgroup namespace
		// calls its own part "/". The root's inode is 1 (kernfs).
		var st unix.Stat_t
		if err := unix.Stat(m, &st); err == nil && st.Ino == 1 {
			return m, nil
		}
	}
	if len(mounts) > 0 {
		return "", fmt.Errorf("%w: only a part of it, at %q", errNoCgroup, mounts)
	}
	return "", errNoCgroup
}

// cgroupMounts returns the mount points of type cgroup2 in a mountinfo file
// (proc_pid_mountinfo(5)).
func cgroupMounts(r io.Reader) ([]string, error) {
	var mounts []string
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		mount, rest, ok := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(mount)
		if ok && len(fields) >= 5 && strings.HasPrefix(rest, "cgroup2 ") {
			mounts = append(mounts, unescapeMount().Replace(fields[4]))
		}
	}
	return mounts, lines.Err()
}

// unescapeMount undoes the octal escapes of mountinfo.
func unescapeMount() *strings.Replacer {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
}
