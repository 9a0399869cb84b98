// SPDX-License-Identifier: Apache-2.0

package users

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/source/containerd"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
)

// maxFile bounds a file that is read for one container, in bytes.
const maxFile = 64 << 10

// access opens a socket below a user's runtime directory. The user may put anything there,
// and exchange it at any time. So each part of the path must be the user's own and no link,
// and what was checked is what is connected to.
type access struct {
	dir  string // the user's runtime directory
	rel  string // of the socket, below dir
	user uint32
}

var _ containerd.Access = access{}

// Check implements engine.Access.
func (a access) Check() error {
	fd, err := a.open()
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

// Dial implements engine.Access.
func (a access) Dial(ctx context.Context, connect engine.Connect) (net.Conn, error) {
	fd, err := a.open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	c, err := connect(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(fd))
	if errors.Is(err, unix.EACCES) {
		err = fmt.Errorf("%s: %w: CAP_DAC_OVERRIDE is missing", a.path(), unix.EACCES)
	}
	if err != nil {
		return nil, err
	}
	if err := a.listensAs(c); err != nil {
		_ = c.Close()
		return nil, err
	}
	return &paced{Conn: c, left: burst, at: time.Now()}, nil
}

func (a access) path() string { return filepath.Join(a.dir, a.rel) }

// open returns a descriptor of the socket, by which it can be connected to.
func (a access) open() (fd int, err error) {
	const flags = unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC
	at, path := unix.AT_FDCWD, a.dir
	parts := append([]string{a.dir}, strings.Split(a.rel, "/")...)
	for i, part := range parts {
		if i > 0 {
			path = filepath.Join(path, part)
		}
		want, kind := uint32(unix.S_IFDIR), "directory"
		if i == len(parts)-1 {
			want, kind = unix.S_IFSOCK, "socket"
		}
		fd, err = unix.Openat(at, part, flags, 0)
		if at != unix.AT_FDCWD {
			_ = unix.Close(at)
		}
		if err != nil {
			return -1, &fs.PathError{Op: "open", Path: path, Err: err}
		}
		var st unix.Stat_t
		if err = unix.Fstat(fd, &st); err == nil {
			switch {
			case st.Mode&unix.S_IFMT != want:
				err = errors.New("is no " + kind)
			case st.Uid != a.user:
				err = fmt.Errorf("belongs to user %d, not %d", st.Uid, a.user)
			}
		}
		if err != nil {
			_ = unix.Close(fd)
			return -1, engine.Refused(fmt.Errorf("%s: %w", path, err)) // it is not an engine's
		}
		at = fd
	}
	return fd, nil
}

// ReadFile implements containerd.Access: it reads a file of at most maxFile bytes that is the
// user's own, wherever it is. Nothing is opened before it is known to be one.
func (a access) ReadFile(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Uid != a.user || st.Size > maxFile {
		return nil, fmt.Errorf("%s: want a regular file of user %d, of at most %d KiB", path, a.user, maxFile>>10)
	}
	f, err := os.Open("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, maxFile))
}

// listensAs returns an error unless the user listens at the other end.
func (a access) listensAs(c net.Conn) error {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return fmt.Errorf("%s: %T is no connection to a socket", a.path(), c)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil {
		return cerr
	}
	if err != nil {
		return fmt.Errorf("%s: who listens: %w", a.path(), err)
	}
	if cred.Uid != a.user {
		return fmt.Errorf("%s: user %d listens, not %d", a.path(), cred.Uid, a.user)
	}
	return nil
}

// What an engine of a user may send: so many bytes at once, and then so many a second. An
// engine that sends more makes its own names late, and costs the agent nothing.
const (
	burst = 4 << 20
	rate  = 64 << 10
)

// paced reads no faster than that.
type paced struct {
	net.Conn

	left int       // bytes that may be read at once; negative: too many were read
	at   time.Time // when left was counted
}

func (p *paced) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	now := time.Now()
	p.left = min(burst, p.left+int(min(now.Sub(p.at).Seconds(), burst/rate)*rate)) - n
	p.at = now
	if p.left < 0 {
		time.Sleep(min(time.Second, time.Duration(-p.left)*time.Second/rate))
	}
	return n, err
}
