// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// ErrMemlock says that BPF maps count against the limit of locked memory, as before Linux
// 5.11, and that the process may not raise it.
var ErrMemlock = errors.New("the limit of locked memory cannot be raised")

// AbsentError says that the kernel has nothing of the name that a hook attaches to. The
// function may be inlined or renamed, or be part of a module that is not loaded or has no
// types.
type AbsentError struct {
	Target string
	Err    error
}

// Error names the target.
func (e *AbsentError) Error() string {
	return fmt.Sprintf("the kernel has no %s to attach to: %v", e.Target, e.Err)
}

// Unwrap returns the error of the kernel.
func (e *AbsentError) Unwrap() error { return e.Err }

// Reason is what of an error of Attach explains why methods failed. More than one part can
// be set, by different methods.
type Reason struct {
	Absent  string // what a hook attaches to, which the kernel does not have
	Verdict string // the verifier's last words on a program that it refused
	Memlock bool   // the limit of locked memory could not be raised
	Hang    bool   // the kernel could hang
}

// Why finds the reason in an error, which may be nil. The best method that failed decides.
func Why(err error) (r Reason) {
	if absent := (*AbsentError)(nil); errors.As(err, &absent) {
		r.Absent = absent.Target
	}
	if refused := (*ebpf.VerifierError)(nil); errors.As(err, &refused) {
		r.Verdict = verdict(refused.Log)
	}
	r.Memlock = errors.Is(err, ErrMemlock)
	r.Hang = errors.Is(err, ErrHang)
	return r
}
