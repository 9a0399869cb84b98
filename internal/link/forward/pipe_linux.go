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

	"github.com/fairlead/fairlead/internal/link/own"
)

const (
	// pipeSize is what is asked for, in bytes. Each page of it takes one piece of a
	// packet, which may be larger. All pipes of a user's processes share 64 MiB
	// (fs.pipe-user-pages-soft), so that 64 busy flows must not take it all.
	pipeSize = 128 << 10

	// pipeLeast is the smallest pipe that is of use. Beyond the user's share the kernel
	// makes pipes of two pages, through which splice(2) costs several times what
	// copying does.
	pipeLeast = 64 << 10

	// spliceMost is what one call moves at most, in bytes.
	spliceMost = 256 << 10

	// chunkMost bounds a chunk that is announced before it is moved, in bytes.
	chunkMost = 1 << 20
)

// kernelPipe is what splice(2) moves bytes through. In the pool it is empty; the
// pool drops it some time after it was last used, which closes it.
type kernelPipe struct {
	r, w    int
	cleanup runtime.Cleanup
}

var pipes = sync.Pool{New: func() any { return newPipe() }}

// newPipe returns nil if there are no descriptors or no memory for a pipe of use.
func newPipe() *kernelPipe {
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return nil
	}
	if own.ScarceFD(max(fds[0], fds[1]), own.ForFlow) || sizeOf(fds[1]) < pipeLeast {
		closeBoth(fds)
		return nil
	}
	p := &kernelPipe{r: fds[0], w: fds[1]}
	p.cleanup = runtime.AddCleanup(p, closeBoth, fds)
	return p
}

// sizeOf asks for pipeSize and returns what the kernel gives.
func sizeOf(fd int) int {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, pipeSize)
	if err != nil {
		n, _ = unix.FcntlInt(uintptr(fd), unix.F_GETPIPE_SZ, 0)
	}
	return n
}

// close is for a pipe that has bytes in it and cannot go back to the pool.
func (p *kernelPipe) close() {
	p.cleanup.Stop()
	closeBoth([2]int{p.r, p.w})
}

func closeBoth(fds [2]int) { _, _ = unix.Close(fds[0]), unix.Close(fds[1]) }

// kernelCopy moves the bytes of a direction by splice(2). It holds a pipe only while
// there is something to move.
type kernelCopy struct {
	d        *direction
	from, to syscall.RawConn
	tryInto  func(fd uintptr) bool // once for all calls, as each would allocate it
	tryOut   func(fd uintptr) bool
	tryCount func(fd uintptr) bool

	p     *kernelPipe
	held  int   // bytes in p
	head  int   // of these, the header of a chunk
	whole bool  // p is kept until a chunk is complete
	limit int   // of one fill
	n     int   // moved, or counted, by the last try
	err   error // of the last try: a syscall.Errno or nil
}

// copyInKernel moves the rest of the direction by splice(2).
func (d *direction) copyInKernel() (readErr, writeErr error) {
	from, err := rawOf(d.src)
	if err != nil {
		return err, nil
	}
	to, err := rawOf(d.dst)
	if err != nil {
		return nil, err
	}
	k := &kernelCopy{d: d, from: from, to: to}
	k.tryInto, k.tryOut, k.tryCount = k.into, k.out, k.count
	defer k.release()
	if src, ok := d.src.(Stream); ok {
		return k.fromChunks(src)
	}
	if dst, ok := d.dst.(Stream); ok {
		return k.toChunks(dst)
	}
	for {
		n, err := k.fill(spliceMost)
		if err != nil {
			return err, nil
		}
		if n == 0 {
			return io.EOF, nil
		}
		if err := k.empty(nil); err != nil {
			return nil, err
		}
	}
}

// fromChunks moves the rest of a link's stream.
func (k *kernelCopy) fromChunks(src Stream) (readErr, writeErr error) {
	for {
		n, err := src.NextChunk()
		if err != nil {
			return err, nil
		}
		n, err = k.fill(min(n, spliceMost))
		if err == nil && n == 0 {
			err = io.ErrUnexpectedEOF
		}
		if errors.Is(err, errNoPipe) {
			return err, nil
		}
		if err := src.Took(n, err); err != nil {
			return err, nil
		}
		if err := k.empty(nil); err != nil {
			return nil, err
		}
	}
}

// toChunks moves the rest of a TCP connection to a link's stream. A chunk is what has
// arrived, and its header goes through the pipe in front of it: the receiver wakes up
// once, and for as much as there is.
func (k *kernelCopy) toChunks(dst Stream) (readErr, writeErr error) {
	for {
		n, err := k.arrived()
		if err != nil {
			return err, nil
		}
		if k.p = pipes.Get().(*kernelPipe); k.p == nil {
			return errNoPipe, nil
		}
		var head [ChunkHead]byte
		if err := dst.BeginChunk(head[:], n); err != nil {
			return nil, err
		}
		if _, err := unix.Write(k.p.w, head[:]); err != nil { // to an empty pipe
			return os.NewSyscallError("write", err), nil
		}
		k.held, k.head, k.whole = ChunkHead, ChunkHead, true
		for n > 0 {
			m, err := k.fill(min(n, spliceMost))
			if err == nil && m == 0 {
				err = io.ErrUnexpectedEOF // in a chunk, so that it is no end
			}
			if err != nil {
				return err, nil
			}
			n -= m
			if err := k.empty(dst); err != nil {
				return nil, err
			}
		}
		k.whole = false
		k.release()
	}
}

// arrived waits for bytes of a TCP connection and returns how many can be read
// without waiting, up to chunkMost; io.EOF at the end.
func (k *kernelCopy) arrived() (int, error) {
	err := k.from.Read(k.tryCount)
	switch {
	case err != nil:
		return 0, err
	case errors.Is(k.err, errNoPipe):
		return 0, k.err
	case k.err != nil:
		return 0, os.NewSyscallError("ioctl", k.err)
	case k.n == 0:
		return 0, io.EOF
	}
	return min(k.n, chunkMost), nil
}

// count counts what has arrived, and reports false if that is nothing yet.
func (k *kernelCopy) count(fd uintptr) bool {
	for {
		if k.n, k.err = unix.IoctlGetInt(int(fd), unix.TIOCINQ); k.err != nil || k.n > 0 {
			return true
		}
		if atUrgent(fd) {
			k.err = errNoPipe
			return true
		}
		// The end and an error are no bytes either.
		var b [1]byte
		n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR), err == nil && n > 0: // it has just arrived
		case errors.Is(err, unix.EAGAIN):
			return false
		default:
			k.err = err
			return true
		}
	}
}

// fill waits for bytes and moves up to limit of them to the pipe, which is fetched when
// there are some. It returns how many; 0 is the end.
func (k *kernelCopy) fill(limit int) (int, error) {
	k.limit, k.n, k.err = limit, 0, nil
	err := k.from.Read(k.tryInto)
	switch {
	case err != nil:
		return 0, err
	case errors.Is(k.err, errNoPipe):
		return 0, k.err
	case k.err != nil:
		return 0, os.NewSyscallError("splice", k.err)
	}
	k.held += k.n
	return k.n, nil
}

func (k *kernelCopy) into(fd uintptr) bool {
	if k.p == nil {
		if k.p = pipes.Get().(*kernelPipe); k.p == nil {
			k.err = errNoPipe
			return true
		}
	}
	k.n, k.err = move(int(fd), k.p.w, k.limit)
	if !errors.Is(k.err, unix.EAGAIN) {
		return true
	}
	if !k.whole {
		k.release() // while it waits
	}
	if k.held == 0 && atUrgent(fd) {
		k.err = errNoPipe
		return true
	}
	return false
}

// atUrgent reports whether an urgent byte of TCP is next, which only read(2) passes over:
// splice(2) waits in front of it for ever (tcp_read_sock in net/ipv4/tcp.c).
func atUrgent(fd uintptr) bool {
	n, err := unix.IoctlGetInt(int(fd), unix.SIOCATMARK)
	return err == nil && n == 1
}

// empty moves all that is in the pipe, and gives the pipe back unless a chunk is not
// complete. to is the stream that it goes to, nil for other connections.
func (k *kernelCopy) empty(to Stream) error {
	d := k.d
	d.stall.begin()
	defer d.stall.end()
	for k.held > 0 {
		k.n, k.err = 0, nil // a closed connection is not tried at all
		err := k.to.Write(k.tryOut)
		if err == nil && k.err != nil {
			err = os.NewSyscallError("splice", k.err)
		}
		if err == nil && k.n == 0 {
			err = io.ErrShortWrite
		}
		n := k.n
		k.held -= n
		head := min(n, k.head)
		k.head -= head
		d.count(n-head, nil)
		if to != nil {
			err = to.Wrote(n, err)
		}
		if err != nil {
			return err
		}
	}
	if !k.whole {
		k.release()
	}
	return nil
}

func (k *kernelCopy) out(fd uintptr) bool {
	k.n, k.err = move(k.p.r, int(fd), k.held)
	return !errors.Is(k.err, unix.EAGAIN)
}

// release gives the pipe back, or closes it if there is something in it.
func (k *kernelCopy) release() {
	switch {
	case k.p == nil:
	case k.held > 0:
		k.p.close()
	default:
		pipes.Put(k.p)
	}
	k.p = nil
}

// rawOf returns the socket that the kernel reads or writes for c.
func rawOf(c net.Conn) (syscall.RawConn, error) { return raw(c).(syscall.Conn).SyscallConn() }

func move(from, to, n int) (int, error) {
	for {
		m, err := unix.Splice(from, nil, to, nil, n, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		if err != unix.EINTR {
			return max(int(m), 0), err
		}
	}
}
