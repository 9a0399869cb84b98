// SPDX-License-Identifier: Apache-2.0

//go:build unix

package status

import (
	"context"
	"errors"
	"net"
	"os"
	"syscall"

	"github.com/fairlead/fairlead/internal/link"
)

func ensureDir(dir string) error { return link.EnsureDir(dir) }

// listenPrivate binds under a temporary name, sets the mode, and then renames the
// socket, so that other users can never connect.
func listenPrivate(path string) (net.Listener, error) {
	tmp := path + ".new"
	_ = os.Remove(tmp)
	l, err := bindPrivate(tmp)
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	err = os.Chmod(tmp, 0o600)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close(), os.Remove(tmp))
	}
	return &unixListener{l, path}, nil
}

// bindPrivate binds a socket to a path. On Linux the file has mode 0600 from the first
// moment, because it inherits the mode of the unbound socket.
func bindPrivate(path string) (*net.UnixListener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			_ = syscall.Fchmod(int(fd), 0o600) // other systems refuse this; the directory is private
		})
	}}
	l, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// unixListener accepts root and this process's user, and removes its name when it closes.
type unixListener struct {
	*net.UnixListener
	path string
}

// Accept implements net.Listener. The mode of the socket keeps others away; this does so
// too where it was changed.
func (l *unixListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.UnixListener.Accept()
		if err != nil || link.TrustedPeer(conn) == nil {
			return conn, err
		}
		_ = conn.Close()
	}
}

func (l *unixListener) Close() error {
	err := l.UnixListener.Close()
	_ = os.Remove(l.path)
	return err
}
