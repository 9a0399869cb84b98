// SPDX-License-Identifier: Apache-2.0

package own

import (
	"context"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// waiter waits until any of many sockets is readable, by epoll(7), on one goroutine. The
// zero value is ready.
type waiter struct {
	mu     sync.Mutex
	ep     *os.File // nil before it runs
	failed bool
	last   uint64            // place
	ready  map[uint64]func() // by place
}

// start makes it run until ctx ends, if it does not yet, and reports whether it does.
func (w *waiter) start(ctx context.Context, spawn func(func())) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ep != nil || w.failed {
		return w.ep != nil
	}
	w.failed = true
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return false
	}
	// An epoll is readable by epoll itself, so that no thread waits for it.
	_ = unix.SetNonblock(fd, true)
	f := os.NewFile(uintptr(fd), "epoll")
	c, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return false
	}
	w.failed, w.ep, w.ready = false, f, make(map[uint64]func())
	spawn(func() { w.run(ctx, c) })
	return true
}

func (w *waiter) run(ctx context.Context, c syscall.RawConn) {
	stop := context.AfterFunc(ctx, func() { _ = w.ep.Close() })
	defer stop()
	events := make([]unix.EpollEvent, 64)
	_ = c.Read(func(fd uintptr) bool {
		for {
			n, err := unix.EpollWait(int(fd), events, 0)
			if err == unix.EINTR {
				continue
			}
			for _, e := range events[:max(n, 0)] {
				w.wake(uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32)
			}
			if n < len(events) {
				return false
			}
		}
	})
}

func (w *waiter) wake(place uint64) {
	w.mu.Lock()
	ready := w.ready[place]
	w.mu.Unlock()
	if ready != nil { // nil if it was closed meanwhile
		ready()
	}
}

// wait has ready called once, when the socket is readable. It returns the place of the
// socket, which is 0 the first time, and is to be given back by forget.
func (w *waiter) wait(place uint64, c syscall.RawConn, ready func()) (uint64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	op := unix.EPOLL_CTL_MOD
	if place == 0 {
		op = unix.EPOLL_CTL_ADD
		w.last++
		place = w.last
	}
	ep, err := w.ep.SyscallConn()
	if err != nil {
		return 0, err
	}
	w.ready[place] = ready
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT, Fd: int32(place), Pad: int32(place >> 32)}
	if err := control(ep, c, func(ep, fd int) error { return unix.EpollCtl(ep, op, fd, &event) }); err != nil {
		delete(w.ready, place)
		return 0, err
	}
	return place, nil
}

// control calls f with two descriptors.
func control(a, b syscall.RawConn, f func(a, b int) error) error {
	var err error
	aerr := a.Control(func(a uintptr) {
		if berr := b.Control(func(b uintptr) { err = f(int(a), int(b)) }); berr != nil {
			err = berr
		}
	})
	if aerr != nil {
		return aerr
	}
	return err
}

// forget frees a place. The kernel forgets a socket that is closed.
func (w *waiter) forget(place uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.ready, place)
}
