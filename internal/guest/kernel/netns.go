// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernel

import (
	"cmp"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace that is held open.
type Namespace struct {
	file  *os.File
	inode uint32
}

const threadNetNS = "/proc/thread-self/ns/net"

// OpenNamespace opens the network namespace of the calling thread, which the
// caller has locked. The caller calls Close.
func OpenNamespace() (*Namespace, error) {
	f, err := os.Open(threadNetNS)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("stat network namespace: %w", err)
	}
	return &Namespace{file: f, inode: uint32(st.Ino)}, nil
}

// NewNamespace makes a network namespace, which needs CAP_SYS_ADMIN. It ends with its
// last user. The caller calls Close.
func NewNamespace() (n *Namespace, err error) {
	err = OnThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		n, err = OpenNamespace()
		return err
	})
	return n, err
}

// LoopbackUp sets up the loopback of the thread's network namespace.
func LoopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}

// OnThread runs f on a thread that ends afterwards, and waits for it. So f may move the
// thread to another network namespace. It is not the main thread, which never ends: Go
// parks it, and /proc/self/ns/net would be the other namespace from then on.
func OnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			done <- f() // never unlocked: the thread ends with the goroutine
			return
		}
		// While this goroutine has the main thread, another one gets another thread.
		defer runtime.UnlockOSThread()
		done <- OnThread(f)
	}()
	return <-done
}

// NamespaceInode returns the inode of the network namespace at path; empty is
// that of the process.
func NamespaceInode(path string) (uint32, error) {
	var st unix.Stat_t
	path = cmp.Or(path, "/proc/self/ns/net")
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("network namespace: %w", &os.PathError{Op: "stat", Path: path, Err: err})
	}
	return uint32(st.Ino), nil
}

// Inode is net->ns.inum of the kernel, unique among the namespaces that exist.
func (n *Namespace) Inode() uint32 { return n.inode }

// Path is that of the namespace in this process, until Close.
func (n *Namespace) Path() string { return fmt.Sprintf("/proc/self/fd/%d", n.file.Fd()) }

// Close lets the namespace go.
func (n *Namespace) Close() error { return n.file.Close() }

// Do runs f on a thread that is in the namespace, and waits for it.
func (n *Namespace) Do(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var st unix.Stat_t
	if err := unix.Stat(threadNetNS, &st); err == nil && uint32(st.Ino) == n.inode {
		return f()
	}
	return OnThread(func() error {
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return f()
	})
}

// EnterNamespace moves the calling thread to the network namespace at path. It is for
// functions that OnThread runs.
func EnterNamespace(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	return nil
}

// PIDNamespace returns the inode of the process's pid namespace, or 0 if it is
// the initial one, whose numbers the kernel uses itself.
func PIDNamespace() (uint32, error) {
	const initial = 0xeffffffc // PROC_PID_INIT_INO of include/linux/proc_ns.h
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return 0, fmt.Errorf("stat pid namespace: %w", err)
	}
	if st.Ino == initial {
		return 0, nil
	}
	return uint32(st.Ino), nil
}
