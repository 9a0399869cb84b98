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

	"github.com/fairlead/fairlead/internal/own"
)

// pipeSize is what is asked for; the kernel may give less.
const pipeSize = 256 << 10

// kernelPipe is what splice(2) moves bytes through. In the pool it is empty; the
// pool drops it some time after it was last used, which closes it.
type kernelPipe struct {
	r, w    int
	cleanup runtime.Cleanup
}

var pipes = sync.Pool{New: func() any {
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return (*kernelPipe)(nil)
	}
	if own.ScarceFD(max(fds[0], fds[1]), own.ForFlow) {
		closeBoth(fds)
		return (*kernelPipe)(nil)
	}
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pipeSize)
	p := &kernelPipe{r: fds[0], w: fds[1]}
	p.cleanup = runtime.AddCleanup(p, closeBoth, fds)
	return p
}}

// pipeLeft reports whether there are descriptors for a pipe, as the net package
// takes one for as long as it copies.
func pipeLeft() bool {
	p := pipes.Get().(*kernelPipe)
	if p == nil {
		return false
	}
	pipes.Put(p)
	return true
}

// close is for a pipe that has bytes in it and cannot go back to the pool.
func (p *kernelPipe) close() {
	p.cleanup.Stop()
	closeBoth([2]int{p.r, p.w})
}

func closeBoth(fds [2]int) { _, _ = unix.Close(fds[0]), unix.Close(fds[1]) }

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
		d.stall.begin()
		err = dst.BeginChunk(n)
		for err == nil && n > 0 {
			var m int
			if m, err = empty(p, to, n); m == 0 && err == nil {
				err = io.ErrShortWrite
			}
			n -= m
			d.count(m, nil)
			err = dst.Wrote(m, err)
		}
		d.stall.end()
		if err != nil {
			p.close()
			return nil, err
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
