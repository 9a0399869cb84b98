// SPDX-License-Identifier: Apache-2.0

//go:build unix

package status

import (
	"net"
	"os"
)

// listenPrivate binds under a temporary name, sets the mode, and then renames the
// socket, so that other users can never connect.
func listenPrivate(path string) (net.Listener, error) {
	tmp := path + ".new"
	_ = os.Remove(tmp)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(tmp, 0o600); err != nil {
		_ = l.Close()
		return nil, err
	}
	if err := os.Rename(tmp, path); err != nil {
		_ = l.Close()
		return nil, err
	}
	return &unixListener{l, path}, nil
}

// unixListener removes its name when it closes.
type unixListener struct {
	*net.UnixListener
	path string
}

func (l *unixListener) Close() error {
	err := l.UnixListener.Close()
	_ = os.Remove(l.path)
	return err
}
