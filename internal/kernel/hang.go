// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrHang says that a BPF trampoline of this process could hang the kernel; see hang.
var ErrHang = errors.New("before Linux 6.9 the end of this PID namespace could hang the kernel")

// initialPIDNamespace is the inode of the machine's own PID namespace: PROC_PID_INIT_INO in
// include/linux/proc_ns.h.
const initialPIDNamespace = 0xEFFFFFFC

// hang returns ErrHang if a BPF trampoline must not be held by a process with this PID, in a PID
// namespace with this inode, on this release of Linux.
//
// When the first process of a PID namespace ends, it kills the others and waits for them
// (zap_pid_ns_processes, kernel/pid_namespace.c). It does so as a reader of RCU tasks. The end of
// a process that holds a trampoline frees that, and waits for all these readers. So neither
// ends, and nor does whatever frees a trampoline later. Linux 6.9 mended it (commit 1612160b9127,
// "rcu-tasks: Eliminate deadlocks involving do_exit() and RCU tasks"). The first process itself
// frees its trampolines before.
func hang(release string, pid int, namespace uint64) error {
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n < 2 || major > 6 || major == 6 && minor >= 9 {
		return nil
	}
	if pid == 1 || namespace == 0 || namespace == initialPIDNamespace {
		return nil
	}
	return ErrHang
}

// mayHang is hang for this process. What cannot be found out is no reason.
func mayHang() error {
	var u unix.Utsname
	var st unix.Stat_t
	_ = unix.Uname(&u)
	_ = unix.Stat("/proc/self/ns/pid", &st)
	return hang(unix.ByteSliceToString(u.Release[:]), os.Getpid(), st.Ino)
}
