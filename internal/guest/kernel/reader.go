// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernel

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// Reader reads the records of a ring buffer, one at a time. One goroutine uses it.
//
// It waits in the runtime's poller. The library's reader would keep a thread in the
// kernel, and each record would cost the wake-up of another one.
type Reader struct {
	reader *ringbuf.Reader
	record ringbuf.Record
	file   *os.File // polled by the runtime
	conn   syscall.RawConn
	closed atomic.Bool
	ready  sync.Mutex // held while Ready looks at the ring, which must not be unmapped then
}

// Reader opens one of Config.Maps. It is closed with the object.
func (o *Object) Reader(name string) (*Reader, error) {
	reader, err := ringbuf.NewReader(o.maps[name])
	if err != nil {
		return nil, fmt.Errorf("ring buffer: %w", err)
	}
	o.made = append(o.made, reader)
	fd, err := unix.FcntlInt(uintptr(o.maps[name].FD()), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("ring buffer: duplicate: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("ring buffer: set non-blocking: %w", err)
	}
	r := &Reader{reader: reader, file: os.NewFile(uintptr(fd), "ringbuf")}
	o.made = append(o.made, closer(func() error {
		r.ready.Lock()
		r.closed.Store(true)
		r.ready.Unlock() // Close waits for a Read, which calls Ready
		return r.file.Close()
	}))
	if r.conn, err = r.file.SyscallConn(); err != nil {
		return nil, fmt.Errorf("ring buffer: %w", err)
	}
	return r, nil
}

// Read waits for a record and returns it; it is valid until the next Read. After
// Close of the object it returns os.ErrClosed.
func (r *Reader) Read() ([]byte, error) {
	err := r.conn.Read(func(uintptr) bool { return r.Ready() })
	switch {
	case r.closed.Load():
		return nil, os.ErrClosed
	case err != nil:
		return nil, fmt.Errorf("ring buffer: wait: %w", err)
	}
	err = r.reader.ReadInto(&r.record)
	return r.record.RawSample, err
}

// Ready reports whether Read would return at once: there is a record, or the object is
// closed. It is called by the goroutine that reads.
func (r *Reader) Ready() bool {
	r.ready.Lock()
	defer r.ready.Unlock()
	return r.closed.Load() || r.reader.AvailableBytes() > 0
}
