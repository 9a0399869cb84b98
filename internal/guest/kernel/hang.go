// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// ErrHang says that a BPF trampoline of this process could hang the kernel; see hang.
var ErrHang = errors.New("the end of this PID namespace could hang the kernel, as of Linux before 6.9")

// initialPIDNamespace is the inode of the machine's own PID namespace: PROC_PID_INIT_INO in
// include/linux/proc_ns.h.
const initialPIDNamespace = 0xEFFFFFFC

// hang returns ErrHang if a BPF trampoline must not be held by a process in a PID namespace
// with this inode, on this release of Linux with these types.
//
// When the first process of a PID namespace ends, it kills the others and waits for them
// (zap_pid_ns_processes, kernel/pid_namespace.c). It does so as a reader of RCU tasks. The end of
// a process that holds a trampoline frees that, and waits for all these readers. So neither
// ends, and nor does whatever frees a trampoline later. A first process is no exception, as its
// namespace may be in another one. Linux 6.9 mended it (commit 1612160b9127, "rcu-tasks:
// Eliminate deadlocks involving do_exit() and RCU tasks"), and so have some later releases of
// older kernels: those whose tasks have the list that this needs (commit bfe93930ea1e).
func hang(release string, namespace uint64, types func() (*btf.Spec, error)) error {
	if namespace == 0 || namespace == initialPIDNamespace {
		return nil
	}
	if mended, known := isSince(release, 6, 9); mended || !known {
		return nil
	}
	kernel, err := types()
	if err != nil {
		return fmt.Errorf("types of the kernel: %w", err) // without them there are no trampolines
	}
	var task *btf.Struct
	if err := kernel.TypeByName("task_struct", &task); err != nil {
		return ErrHang
	}
	if slices.ContainsFunc(task.Members, func(m btf.Member) bool { return m.Name == "rcu_tasks_exit_list" }) {
		return nil
	}
	return ErrHang
}

// mayHang is hang for this process. A namespace or release that cannot be found out is no reason.
func mayHang(types *btf.Cache) error {
	var st unix.Stat_t
	_ = unix.Stat("/proc/self/ns/pid", &st)
	return hang(release(), st.Ino, types.Kernel)
}

// byTrampoline reports whether a program is attached to a function of the kernel by a
// trampoline.
func byTrampoline(p *ebpf.ProgramSpec) bool {
	return p.Type == ebpf.Tracing && p.AttachType != ebpf.AttachTraceIter && p.AttachType != ebpf.AttachTraceRawTp
}
