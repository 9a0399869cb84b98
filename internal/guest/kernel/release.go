// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Since reports whether this kernel is of Linux major.minor or a later version. It is false
// if its release cannot be read.
func Since(major, minor int) bool {
	since, known := isSince(release(), major, minor)
	return known && since
}

// release returns the release of this kernel (uname(2)), "" if it cannot be found out.
func release() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// isSince reports whether a release is of Linux major.minor or a later version, and whether
// it begins with a version.
func isSince(release string, major, minor int) (since, known bool) {
	var x, y int
	if n, _ := fmt.Sscanf(release, "%d.%d", &x, &y); n < 2 {
		return false, false
	}
	return x > major || x == major && y >= minor, true
}
