// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// stateFile returns the path of a file that this agent alone has, also if another one has
// its control socket in the same directory. It is beside the socket: the directory belongs
// to root and is empty after a reboot. Earlier versions named the file by the directory
// only; such a file is taken over by the first agent that asks.
func (a *Agent) stateFile(name string) string {
	path := a.cfg.Control + "." + name
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return path
	}
	err := os.Rename(filepath.Join(filepath.Dir(a.cfg.Control), name), path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.log.Warn("cannot take over what an earlier version kept", "err", err)
	}
	return path
}
