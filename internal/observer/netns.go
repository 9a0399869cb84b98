// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// namespace is a network namespace that is held open.
type namespace struct {
	file  *os.File
	inode uint32 // as the kernel's net->ns.inum; unique among those alive
}

const threadNetNS = "/proc/thread-self/ns/net"

// openNamespace opens that of the calling thread, which the caller has locked.
func openNamespace() (*namespace, error) {
	f, err := os.Open(threadNetNS)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("stat network namespace: %w", err)
	}
	return &namespace{file: f, inode: uint32(st.Ino)}, nil
}

func (n *namespace) close() error { return n.file.Close() }

// do runs f on a thread that is in the namespace, and waits for it.
func (n *namespace) do(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		var st unix.Stat_t
		if err := unix.Stat(threadNetNS, &st); err == nil && uint32(st.Ino) == n.inode {
			err := f()
			runtime.UnlockOSThread()
			done <- err
			return
		}
		// This thread ends with the goroutine: nobody else shall get it.
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter network namespace: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}

// pidNamespace returns the inode of the process's pid namespace, or 0 if it is
// the initial one, where the kernel's numbers are everybody's.
func pidNamespace() (uint32, error) {
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
