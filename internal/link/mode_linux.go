// SPDX-License-Identifier: Apache-2.0

package link

import (
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// setMode sets the mode of the socket at path. What replaced it, such as a link to a file
// by whoever can write to the directory, keeps its mode.
func setMode(path string, mode fs.FileMode) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return fmt.Errorf("%s was replaced by what is not a socket", path)
	}
	// fchmod(2) refuses such a descriptor, and fchmodat2(2) is not there before Linux 6.6.
	return os.Chmod("/proc/self/fd/"+strconv.Itoa(fd), mode)
}
