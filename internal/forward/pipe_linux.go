// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// pipeSize is what is asked for; the kernel may give less.
const pipeSize = 256 << 10

// kernelPipe is what splice(2) moves bytes through. It is empty whenever it is in the
// pool, which closes it some time after it was last used.
type kernelPipe struct{ r, w int }

var pipes = sync.Pool{New: func() any {
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return (*kernelPipe)(nil)
	}
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pipeSize)
	p := &kernelPipe{fds[0], fds[1]}
	runtime.AddCleanup(p, func(fds [2]int) { _, _ = unix.Close(fds[0]), unix.Close(fds[1]) }, fds)
	return p
}}

// toChunks moves the rest of a TCP connection to a link's stream. A pipe is held
// only while there is something to move.
func (d *direction) toChunks(dst Stream, src *net.TCPConn) (readErr, writeErr error) {
	from, err := src.SyscallConn()
	if err != nil {
		return err, nil
	}
	to, err := dst.Raw().(syscall.Conn).SyscallConn()
	if err != nil {
		return nil, err
	}
	for {
		p, n, err := fill(from)
		if err != nil {
			return err, nil
		}
		err = dst.BeginChunk(n)
		for err == nil && n > 0 {
			var m int
			if m, err = empty(p, to, n); m == 0 && err == nil {
				err = io.ErrShortWrite
			}
			n -= m
			d.moved.Add(uint64(m))
			err = dst.Wrote(m, err)
		}
		if err != nil {
			return nil, err // p has bytes in it: not for the pool
		}
		pipes.Put(p)
	}
}

// fill waits for bytes of from and returns a pipe with n of them.
func fill(from syscall.RawConn) (p *kernelPipe, n int, err error) {
	var serr error // a syscall.Errno or nil
	err = from.Read(func(fd uintptr) bool {
		if p = pipes.Get().(*kernelPipe); p == nil {
			return true
		}
		n, serr = move(int(fd), p.w, pipeSize)
		if n > 0 {
			return true
		}
		pipes.Put(p)
		return !errors.Is(serr, unix.EAGAIN)
	})
	switch {
	case p == nil && err == nil:
		return nil, 0, errNoPipe
	case err != nil:
		return nil, 0, err
	case serr != nil:
		return nil, 0, os.NewSyscallError("splice", serr)
	case n == 0:
		return nil, 0, io.EOF
	}
	return p, n, nil
}

// empty moves up to n bytes of p to a connection, when that takes any.
func empty(p *kernelPipe, to syscall.RawConn, n int) (moved int, err error) {
	var serr error
	err = to.Write(func(fd uintptr) bool {
		moved, serr = move(p.r, int(fd), n)
		return !errors.Is(serr, unix.EAGAIN)
	})
	runtime.KeepAlive(p)
	if err == nil && serr != nil {
		err = os.NewSyscallError("splice", serr)
	}
	return moved, err
}

func move(from, to, n int) (int, error) {
	for {
		m, err := unix.Splice(from, nil, to, nil, n, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		if err != unix.EINTR {
			return max(int(m), 0), err
		}
	}
}
