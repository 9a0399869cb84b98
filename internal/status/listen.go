// SPDX-License-Identifier: Apache-2.0

package status

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// errWSAConnRefused is ECONNREFUSED on Windows; no other system has this number.
const errWSAConnRefused = syscall.Errno(10061)

// ListenControl opens the control socket at path: 0600, in a directory of root or of
// ours to which no other user can write; it is made with mode 0700 if it is missing. A dead
// socket is replaced; a live one is an error. Only root and this process's user can connect.
func ListenControl(path string) (net.Listener, error) {
	if err := ensureDir(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if info, err := os.Lstat(path); err == nil && (info.Mode().IsRegular() || info.Mode()&(fs.ModeSocket|fs.ModeIrregular) == 0) {
		// Windows shows a socket as an irregular file.
		return nil, fmt.Errorf("control socket %s: it exists and is not a socket: remove it, or choose another --control path", path)
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("control socket %s: in use by a running fairlead: stop it, or choose another --control path", path)
	} else if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, errWSAConnRefused) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("control socket %s: remove the dead socket: %w", path, err)
		}
	}
	l, err := listenPrivate(path)
	if err != nil {
		return nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	return l, nil
}
