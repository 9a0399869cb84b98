// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernel

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
)

var errNoCgroup = errors.New("the root of the cgroup2 hierarchy is not mounted")

// cgroupRoot finds where the root of the cgroup2 hierarchy is mounted. A
// program attached there sees all sockets; attached below it sees some.
func cgroupRoot() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find cgroup2: %w", err)
	}
	defer func() { _ = f.Close() }()
	whole, parts, err := cgroup.Mounts(f)
	if err != nil {
		return "", fmt.Errorf("find cgroup2: %w", err)
	}
	mounts := append(whole, parts...)
	for _, m := range mounts {
		// A mount may show only a subtree, and a cgroup namespace calls its own
		// subtree "/". The inode of the real root is 1 (kernfs).
		var st unix.Stat_t
		if err := unix.Stat(m, &st); err == nil && st.Ino == 1 {
			return m, nil
		}
	}
	if len(mounts) > 0 {
		return "", fmt.Errorf("%w: only a subtree, at %q", errNoCgroup, mounts)
	}
	return "", errNoCgroup
}
