// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernel

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
)

// Ring reads a BPF ring buffer in place. It is not the library's reader, because
// that cannot announce to the programs that it sleeps (struct control), be read by
// another goroutine while one waits, or lend records without a copy.
//
// The layout is that of kernel/bpf/ringbuf.c: a page with the consumer's
// position, a page with the producer's, and the data. The kernel offers the data
// twice in a row, so that a record never wraps; all of it would count as our
// memory, so it is mapped once and a record that wraps is copied.
type Ring struct {
	file     *os.File // polled by the runtime
	conn     syscall.RawConn
	closed   atomic.Bool
	mapped   [2][]byte
	consumer *atomic.Uint64
	producer *atomic.Uint64
	data     []byte
	mask     uint64
	control  *Control
	waiting  atomic.Uint32 // the value that Wait stored in control.asleep, 0 outside of it
	wrapped  []byte        // copy of a record that wraps
}

// Control is struct control of bpf/event.h, shared with the programs.
type Control struct {
	asleep atomic.Uint32

	Open  atomic.Uint32 // 1: the end of sockets that are not tracked is reported
	Lost  atomic.Uint32 // 1: a record was lost since this was cleared
	Bound atomic.Uint32 // 1: bound TCP sockets are observed
}

const (
	ringHeader  = 8 // bytes: length with flags, page offset
	ringBusy    = 1 << 31
	ringDiscard = 1 << 30
)

var errRing = errors.New("ring buffer is inconsistent")

// Ring opens the ring buffer and the control page among Config.Maps. The caller
// calls Close.
func (o *Object) Ring(events, control string) (*Ring, error) {
	m := o.maps[events]
	fd, err := unix.FcntlInt(uintptr(m.FD()), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("ring buffer: duplicate: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("ring buffer: set non-blocking: %w", err)
	}
	r := &Ring{file: os.NewFile(uintptr(fd), "ringbuf")}
	if err := r.mapMemory(fd, int(m.MaxEntries()), o.maps[control].FD()); err != nil {
		return nil, errors.Join(fmt.Errorf("ring buffer: %w", err), r.Close())
	}
	return r, nil
}

func (r *Ring) mapMemory(fd, size, controlFD int) error {
	page := os.Getpagesize()
	consumer, err := unix.Mmap(fd, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map consumer page: %w", err)
	}
	r.mapped[0] = consumer
	producer, err := unix.Mmap(fd, int64(page), page+size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map data pages: %w", err)
	}
	r.mapped[1] = producer
	shared, err := unix.Mmap(controlFD, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map control page: %w", err)
	}
	r.control = (*Control)(unsafe.Pointer(&shared[0]))
	r.consumer = (*atomic.Uint64)(unsafe.Pointer(&consumer[0]))
	r.producer = (*atomic.Uint64)(unsafe.Pointer(&producer[0]))
	r.data = producer[page:]
	r.mask = uint64(size - 1)

	if r.conn, err = r.file.SyscallConn(); err != nil {
		return fmt.Errorf("raw connection: %w", err)
	}
	return nil
}

// Control returns the control page, valid until Close.
func (r *Ring) Control() *Control { return r.control }

// Stop ends Wait, now and from now on. The memory stays mapped.
func (r *Ring) Stop() error {
	r.closed.Store(true)
	if err := r.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("ring buffer: close: %w", err)
	}
	return nil
}

// Close frees everything. Nobody may use the ring any more.
func (r *Ring) Close() error {
	err := r.Stop()
	for _, m := range r.mapped {
		if m != nil {
			err = errors.Join(err, unix.Munmap(m))
		}
	}
	if c := r.control; c != nil {
		page := unsafe.Slice((*byte)(unsafe.Pointer(c)), os.Getpagesize())
		err = errors.Join(err, unix.Munmap(page))
	}
	r.mapped, r.control = [2][]byte{}, nil
	return err
}

// header returns the first word of the record at position.
func (r *Ring) header(position uint64) uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&r.data[position&r.mask])).Load()
}

// ready reports whether a record is committed.
func (r *Ring) ready() bool {
	at := r.consumer.Load()
	return at != r.producer.Load() && r.header(at)&ringBusy == 0
}

// End returns the position behind all records that have been begun.
func (r *Ring) End() uint64 { return r.producer.Load() }

// Position returns where the next read begins.
func (r *Ring) Position() uint64 { return r.consumer.Load() }

// Read lends up to limit committed records to f, in order, and frees their
// room. It returns how many there were, wake-up records included, and stops
// early when the next is not committed. One caller at a time.
func (r *Ring) Read(limit int, f func(sample []byte)) (int, error) {
	at, end := r.consumer.Load(), r.producer.Load()
	n := 0
	for ; n < limit && at != end; n++ {
		header := r.header(at)
		if header&ringBusy != 0 {
			break
		}
		length := uint64(header &^ (ringBusy | ringDiscard))
		next := at + ringHeader + (length+7)&^7
		if next > end || length > r.mask {
			r.consumer.Store(end)
			return n, fmt.Errorf("%w: record of %d bytes with %d left", errRing, length, end-at)
		}
		if header&ringDiscard == 0 {
			f(r.sample(at+ringHeader, length))
		}
		at = next
	}
	if n > 0 {
		r.consumer.Store(at)
	}
	return n, nil
}

// sample returns length bytes at a position.
func (r *Ring) sample(at, length uint64) []byte {
	start := at & r.mask
	if start+length <= uint64(len(r.data)) {
		return r.data[start : start+length]
	}
	r.wrapped = append(r.wrapped[:0], r.data[start:]...)
	return append(r.wrapped, r.data[:length-uint64(len(r.wrapped))]...)
}

// Wait blocks until a record is committed, or returns os.ErrClosed when Stop is
// called. With throttle above 0 it returns after that time at the latest, and
// events of UDP do not end it before. It may return without a record.
func (r *Ring) Wait(throttle time.Duration) error {
	sleep := bpf.SockSleepSLEEP_ANY
	if throttle > 0 {
		sleep = bpf.SockSleepSLEEP_TCP
		if err := r.file.SetReadDeadline(time.Now().Add(throttle)); err != nil {
			return r.waited(err)
		}
	}
	r.waiting.Store(uint32(sleep))
	defer r.waiting.Store(uint32(bpf.SockSleepSLEEP_AWAKE))
	err := r.conn.Read(func(uintptr) bool {
		// The store is a full barrier before the check, as a commit is one
		// before the program's check of asleep: one of us sees the other.
		r.control.asleep.Store(uint32(sleep))
		if !r.ready() {
			return false
		}
		r.control.asleep.Store(uint32(bpf.SockSleepSLEEP_AWAKE))
		return true
	})
	if throttle > 0 {
		r.control.asleep.Store(uint32(bpf.SockSleepSLEEP_AWAKE))
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = nil
		}
		err = errors.Join(err, r.file.SetReadDeadline(time.Time{}))
	}
	return r.waited(err)
}

// Rearm is called after Read while another goroutine is in Wait: the record that
// woke the waiter may be gone before it looks, and it would go on waiting while no
// producer knows. Rearm makes the next record wake it again. It reports whether one
// is there already, which the caller must read.
func (r *Ring) Rearm() bool {
	sleep := r.waiting.Load()
	if sleep == uint32(bpf.SockSleepSLEEP_AWAKE) {
		return false
	}
	r.control.asleep.Store(sleep)
	return r.ready()
}

func (r *Ring) waited(err error) error {
	if r.closed.Load() {
		return os.ErrClosed
	}
	if err != nil {
		return fmt.Errorf("ring buffer: wait: %w", err)
	}
	return nil
}
