// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxExits bounds the processes that are watched, each by a descriptor. The end of others
// is noticed by an audit.
const maxExits = 1024

// exits tells when processes end, and has hooks tell when they get another name.
type exits struct {
	epoll *os.File // which the runtime polls: to wait takes no thread
	named interface {
		Put(pid, value any) error
		Delete(pid any) error
	} // a map of the processes of which hooks tell; nil without hooks

	mu  sync.Mutex
	fds map[uint32]int // by pid
}

func openExits() (*exits, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll for processes: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("epoll for processes: %w", err), unix.Close(fd))
	}
	return &exits{epoll: os.NewFile(uintptr(fd), "epoll"), fds: make(map[uint32]int)}, nil
}

// watch has wait return when a process ends. One that has ended, or cannot be watched, is
// left to who looks at it next.
func (x *exits) watch(pid uint32) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if _, known := x.fds[pid]; known || len(x.fds) >= maxExits {
		return
	}
	fd, err := unix.PidfdOpen(int(pid), 0)
	if err != nil {
		return
	}
	err = x.control(func(epoll int) error {
		return unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(pid)})
	})
	if err != nil {
		_ = unix.Close(fd)
		return
	}
	x.fds[pid] = fd
	if x.named != nil {
		_ = x.named.Put(pid, uint8(1)) // has room for maxExits
	}
}

func (x *exits) control(f func(epoll int) error) error {
	raw, err := x.epoll.SyscallConn()
	if err != nil {
		return err
	}
	return errors.Join(raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
}

// retain stops watching the processes that are not in keep.
func (x *exits) retain(keep map[uint32]struct{}) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for pid := range x.fds {
		if _, ok := keep[pid]; !ok {
			x.forget(pid)
		}
	}
}

// forget closes a descriptor, which also takes it out of epoll.
func (x *exits) forget(pid uint32) {
	if fd, ok := x.fds[pid]; ok {
		_ = unix.Close(fd)
		delete(x.fds, pid)
		if x.named != nil {
			_ = x.named.Delete(pid)
		}
	}
}

// wait waits until processes have ended, and returns them. It fails when x is stopped.
func (x *exits) wait() (pids []uint32, err error) {
	raw, err := x.epoll.SyscallConn()
	if err != nil {
		return nil, err
	}
	rerr := raw.Read(func(fd uintptr) bool {
		var ready [64]unix.EpollEvent
		var n int
		if n, err = unix.EpollWait(int(fd), ready[:], 0); err != nil { // nothing interrupts what does not block
			return true
		}
		x.mu.Lock()
		defer x.mu.Unlock()
		for _, r := range ready[:n] {
			pids = append(pids, uint32(r.Fd))
			x.forget(uint32(r.Fd))
		}
		return n > 0
	})
	return pids, errors.Join(rerr, err)
}

func (x *exits) stop() { _ = x.epoll.SetReadDeadline(time.Now()) }

func (x *exits) close() error {
	x.retain(nil)
	return x.epoll.Close()
}
