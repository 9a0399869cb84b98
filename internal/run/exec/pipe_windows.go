// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"crypto/rand"
	"errors"
	"io"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/windows"
)

// pipeSize is the buffer of a pipe, in bytes.
const pipeSize = 64 << 10

// pipe is one of a job's pipes. The program's end is inheritable, and ours can be waited for
// with a deadline, which the pipes of CreatePipe cannot.
type pipe struct {
	ours   *os.File
	theirs windows.Handle
}

// newPipe makes a pipe that the program reads or writes.
//
// It has a name that nobody can guess and takes one writer. Who else sees the name could only
// be that writer, which takes the rights of this process's user: then it is an error here. See
// "Named Pipe Security and Access Rights" of Microsoft.
func newPipe(theyRead bool) (p pipe, err error) {
	name, err := windows.UTF16PtrFromString(`\\.\pipe\fairlead-` + rand.Text())
	if err != nil {
		return p, err
	}
	heritable := &windows.SecurityAttributes{Length: uint32(unsafe.Sizeof(windows.SecurityAttributes{})), InheritHandle: 1}
	readFlags, writeFlags := uint32(windows.FILE_FLAG_OVERLAPPED), uint32(0)
	var readers, writers *windows.SecurityAttributes
	if theyRead {
		readFlags, writeFlags = writeFlags, readFlags
		readers = heritable
	} else {
		writers = heritable
	}
	r, err := windows.CreateNamedPipe(name, windows.PIPE_ACCESS_INBOUND|windows.FILE_FLAG_FIRST_PIPE_INSTANCE|readFlags,
		windows.PIPE_TYPE_BYTE|windows.PIPE_REJECT_REMOTE_CLIENTS, 1, pipeSize, pipeSize, 0, readers)
	if err != nil {
		return p, os.NewSyscallError("CreateNamedPipe", err)
	}
	w, err := windows.CreateFile(name, windows.GENERIC_WRITE|windows.FILE_READ_ATTRIBUTES, 0, writers, windows.OPEN_EXISTING, writeFlags, 0)
	if err != nil {
		return p, errors.Join(os.NewSyscallError("CreateFile", err), windows.CloseHandle(r))
	}
	if theyRead {
		return pipe{ours: os.NewFile(uintptr(w), "stdin"), theirs: r}, nil
	}
	return pipe{ours: os.NewFile(uintptr(r), "output"), theirs: w}, nil
}

// close may be called when the pipe, or the program's end of it, is missing.
func (p *pipe) close() {
	p.leave()
	_ = p.ours.Close() // nil is refused
}

// leave closes the program's end here.
func (p *pipe) leave() {
	if p.theirs != 0 {
		_ = windows.CloseHandle(p.theirs)
		p.theirs = 0
	}
}

// output is the caller's end of one of a job's outputs.
type output struct {
	file *os.File
	over atomic.Bool // the job has gone: return only what is there
}

// finish makes what another process than the job's may still write the end.
func (o *output) finish() {
	o.over.Store(true)
	_ = o.file.SetReadDeadline(time.Now())
}

// Read returns io.EOF where nobody can write any more, or the job has gone and nothing is left.
// Not after a write of no bytes, which os.File takes for the end of a pipe.
func (o *output) Read(b []byte) (int, error) {
	for len(b) > 0 {
		if o.over.Load() {
			if left, err := o.left(); err != nil || left == 0 {
				return 0, io.EOF
			}
			_ = o.file.SetReadDeadline(time.Time{}) // what is there does not block
		}
		n, err := o.file.Read(b)
		switch {
		case n > 0 || err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrDeadlineExceeded):
			return n, err
		case errors.Is(err, io.EOF):
			if _, err := o.left(); err != nil {
				return 0, io.EOF
			}
		}
	}
	return 0, nil
}

// left returns how many bytes are in the pipe, an error if it is empty and has no writer.
func (o *output) left() (n uint32, err error) {
	raw, err := o.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	peek := windows.NewLazySystemDLL("kernel32.dll").NewProc("PeekNamedPipe")
	cerr := raw.Control(func(fd uintptr) {
		if ok, _, e := peek.Call(fd, 0, 0, 0, uintptr(unsafe.Pointer(&n)), 0); ok == 0 {
			err = e
		}
	})
	return n, errors.Join(cerr, err)
}
