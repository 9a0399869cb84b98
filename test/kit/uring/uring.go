// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package uring opens sockets by io_uring: the kernel makes, binds and listens without the
// system calls of these names.
package uring

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Of include/uapi/linux/io_uring.h.
const (
	opSocket = 45 // since Linux 5.19
	opBind   = 56 // since Linux 6.11
	opListen = 57 // since Linux 6.11

	always = 1 << 4 // IOSQE_ASYNC: by a worker of the kernel

	getEvents     = 1 // IORING_ENTER_GETEVENTS
	registerProbe = 8
	supported     = 1 // IO_URING_OP_SUPPORTED

	submissions = 0
	completions = 0x8000000
	entries     = 0x10000000
)

// ErrUnsupported says that the kernel has no io_uring, or one that does not listen.
var ErrUnsupported = errors.New("io_uring cannot listen on this kernel")

type params struct {
	submissions, completions, flags, cpu, idle, features, queue uint32
	_                                                           [3]uint32
	sq                                                          struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		_                                                   uint64
	}
	cq struct {
		head, tail, mask, entries, overflow, events, flags, _ uint32
		_                                                     uint64
	}
}

type entry struct {
	op, flags uint8
	_         uint16
	fd        int32
	off, addr uint64
	length    uint32
	_         uint32
	data      uint64
	_         [3]uint64
}

type event struct {
	_      uint64
	result int32
	_      uint32
}

// Ring is a ring with room for one operation at a time.
type Ring struct {
	fd         int
	p          params
	sq, cq, es []byte
	flags      uint8
}

// Open makes a ring. If worker is true, a worker of the kernel does the operations. The
// caller calls Close. The error is ErrUnsupported where the kernel cannot do them.
func Open(worker bool) (*Ring, error) {
	r := new(Ring)
	if worker {
		r.flags = always
	}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&r.p)), 0)
	switch errno {
	case 0:
	case unix.ENOSYS, unix.EPERM: // not built in; sysctl kernel.io_uring_disabled
		return nil, fmt.Errorf("%w: %w", ErrUnsupported, errno)
	default:
		return nil, fmt.Errorf("io_uring_setup: %w", errno)
	}
	r.fd = int(fd)
	if err := r.prepare(); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (r *Ring) prepare() (err error) {
	var probe struct {
		_   [16]byte
		ops [256]struct {
			_     uint16
			flags uint16
			_     uint32
		}
	}
	if _, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(r.fd), registerProbe, uintptr(unsafe.Pointer(&probe)), uintptr(len(probe.ops)), 0, 0); errno != 0 {
		return fmt.Errorf("io_uring_register: %w", errno)
	}
	for _, op := range []int{opSocket, opBind, opListen} {
		if probe.ops[op].flags&supported == 0 {
			return fmt.Errorf("%w: no operation %d", ErrUnsupported, op)
		}
	}
	for _, m := range []struct {
		to   *[]byte
		off  int64
		size uint32
	}{
		{&r.sq, submissions, r.p.sq.array + 4*r.p.submissions},
		{&r.cq, completions, r.p.cq.events + uint32(unsafe.Sizeof(event{}))*r.p.completions},
		{&r.es, entries, uint32(unsafe.Sizeof(entry{})) * r.p.submissions},
	} {
		if *m.to, err = unix.Mmap(r.fd, m.off, int(m.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
			return fmt.Errorf("map the ring: %w", err)
		}
	}
	return nil
}

// Close ends the ring. Sockets stay open.
func (r *Ring) Close() error {
	var errs []error
	for _, b := range [][]byte{r.sq, r.cq, r.es} {
		if b != nil {
			errs = append(errs, unix.Munmap(b))
		}
	}
	return errors.Join(append(errs, unix.Close(r.fd))...)
}

// Listen opens a TCP socket that listens on an IPv4 address, and returns its descriptor.
func (r *Ring) Listen(at netip.AddrPort) (fd int, err error) {
	fd, err = r.do(entry{op: opSocket, fd: unix.AF_INET, off: unix.SOCK_STREAM | unix.SOCK_CLOEXEC, length: unix.IPPROTO_TCP})
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	name := &unix.RawSockaddrInet4{Family: unix.AF_INET, Port: at.Port()<<8 | at.Port()>>8, Addr: at.Addr().As4()}
	_, err = r.do(entry{op: opBind, fd: int32(fd), addr: uint64(uintptr(unsafe.Pointer(name))), off: unix.SizeofSockaddrInet4})
	runtime.KeepAlive(name)
	if err == nil {
		_, err = r.do(entry{op: opListen, fd: int32(fd), length: 16})
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("listen: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// do submits one operation and waits for its end.
func (r *Ring) do(e entry) (int, error) {
	e.flags = r.flags
	tail := word(r.sq, r.p.sq.tail)
	at := atomic.LoadUint32(tail)
	slot := at & *word(r.sq, r.p.sq.mask)
	*(*entry)(unsafe.Pointer(&r.es[uintptr(slot)*unsafe.Sizeof(e)])) = e
	*word(r.sq, r.p.sq.array+4*slot) = slot
	atomic.StoreUint32(tail, at+1)
	for submit := uintptr(1); ; {
		n, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), submit, 1, getEvents, 0, 0)
		if errno == 0 {
			submit -= n
		} else if errno != unix.EINTR {
			return -1, fmt.Errorf("io_uring_enter: %w", errno)
		}
		head := word(r.cq, r.p.cq.head)
		if done := atomic.LoadUint32(head); done != atomic.LoadUint32(word(r.cq, r.p.cq.tail)) {
			slot := done & *word(r.cq, r.p.cq.mask)
			ended := (*event)(unsafe.Pointer(&r.cq[uintptr(r.p.cq.events)+uintptr(slot)*unsafe.Sizeof(event{})]))
			result := ended.result
			atomic.StoreUint32(head, done+1)
			if result < 0 {
				return -1, unix.Errno(-result)
			}
			return int(result), nil
		}
	}
}

func word(b []byte, at uint32) *uint32 { return (*uint32)(unsafe.Pointer(&b[at])) }
