// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// unixListener is a listener on a socket file. It takes its own file away when it
// closes, and no other.
type unixListener struct {
	*net.UnixListener
	path string
	file fs.FileInfo
}

// listenUnix claims path: mode 0600, in a directory of ours that no one else
// may write to, made with mode 0700 if it is missing. If it is shared with other
// users, any of them can connect: mode 0666, in a directory that they may enter
// (0711); credentials are checked afterwards. A dead socket there is replaced;
// one that answers is not.
func listenUnix(ctx context.Context, path string, shared bool) (*unixListener, error) {
	dir, mode := filepath.Dir(path), fs.FileMode(0o600)
	made, err := ensureDir(dir)
	if err != nil {
		return nil, err
	}
	if shared {
		mode = 0o666
		if err := openDir(dir, made); err != nil {
			return nil, err
		}
	}
	return claimSocket(ctx, path, mode)
}

// ListenPackets listens for SOCK_SEQPACKET connections at path, in a directory that no
// other user may write to, and that is made with mode 0700 if it is missing. Every process
// that reaches the path can connect: the caller checks who it is. A dead socket is replaced.
// Closing the listener removes the socket. The directory is not locked, because a container
// that has it mounted could keep the lock.
func ListenPackets(ctx context.Context, path string) (net.Listener, error) {
	if _, err := ensureDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	l, err := makeSocket(ctx, "unixpacket", path, 0o666)
	if err != nil {
		return nil, err
	}
	return l, nil
}

// claimSocket listens at path, whose directory exists, and is ours alone.
func claimSocket(ctx context.Context, path string, mode fs.FileMode) (l *unixListener, err error) {
	unlock, err := lockDir(ctx, filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	return makeSocket(ctx, "unix", path, mode)
}

// makeSocket listens at path, where it replaces a socket that nobody serves.
func makeSocket(ctx context.Context, network, path string, mode fs.FileMode) (l *unixListener, err error) {
	if err := clearSocket(ctx, network, path); err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	nl, err := lc.Listen(ctx, network, path)
	if err != nil {
		return nil, err
	}
	l = &unixListener{UnixListener: nl.(*net.UnixListener), path: path}
	l.SetUnlinkOnClose(false)
	// Until here the mode was the umask's; credentials are checked all the same.
	err = setMode(path, mode)
	if err == nil {
		l.file, err = os.Lstat(path)
	}
	if err != nil {
		return nil, errors.Join(err, l.UnixListener.Close(), os.Remove(path))
	}
	return l, nil
}

func ensureDir(dir string) (made bool, err error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return false, err
	}
	if err = os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	made = err == nil
	target, err := filepath.EvalSymlinks(dir) // /var/run may be a link to /run
	if err != nil {
		return made, err
	}
	fi, err := os.Lstat(target)
	if err != nil {
		return made, err
	}
	if !fi.IsDir() {
		return made, fmt.Errorf("%s is not a directory", dir)
	}
	return made, privateDir(dir, fi)
}

// clearSocket removes a socket that nobody serves.
func clearSocket(ctx context.Context, network, path string) error {
	before, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	// Windows shows a socket as an irregular file.
	if before.Mode().IsRegular() || before.Mode()&(fs.ModeSocket|fs.ModeIrregular) == 0 {
		return fmt.Errorf("%s exists and is not a socket: remove it or choose another path", path)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, network, path)
	if err == nil {
		return errors.Join(fmt.Errorf("%s is served by another process: stop it or choose another path", path), c.Close())
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, errWSAConnRefused) {
		return fmt.Errorf("%s: cannot find out whether another process serves it: %w", path, err)
	}
	return os.Remove(path)
}

// errWSAConnRefused is ECONNREFUSED on Windows; no other system has it.
const errWSAConnRefused = syscall.Errno(10061)

// Close stops listening and removes the socket, unless another socket has replaced it.
func (l *unixListener) Close() error {
	var err error
	if fi, serr := os.Lstat(l.path); serr == nil && os.SameFile(fi, l.file) {
		err = os.Remove(l.path)
	}
	return errors.Join(err, l.UnixListener.Close())
}
