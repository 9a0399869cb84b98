// SPDX-License-Identifier: Apache-2.0

package privilege

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Limit reduces the capabilities of all threads of this process to those of keep that it
// has, and sets no_new_privs, so that no program that it starts gets more. What is dropped
// cannot be regained. The bounding set is reduced to bound, which a later call may keep: that
// needs CAP_SETPCAP, which only the first call has.
//
// A program that is built with cgo keeps what it has and gets an error, because Go can
// change all threads only without.
func Limit(keep, bound Set) error {
	if err := allThreads(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	hdr := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if err := unix.Capget(hdr, &has[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	if err := limitBounding(bound, Set(has[0].Effective)); err != nil {
		return err
	}
	if err := allThreads(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	data := &[2]unix.CapUserData{}
	for i := range data {
		data[i].Permitted = has[i].Permitted & uint32(keep>>(32*i))
		data[i].Effective = data[i].Permitted
	}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(hdr)), uintptr(unsafe.Pointer(data)), 0)
	if errno != 0 {
		return fmt.Errorf("drop capabilities: %w", errno)
	}
	return nil
}

// limitBounding drops from the bounding set what is not in bound. Without CAP_SETPCAP the
// set stays: with no_new_privs it gives nothing to anyone.
func limitBounding(bound, effective Set) error {
	if !effective.Has(unix.CAP_SETPCAP) {
		return nil
	}
	for bit := uint(0); bit < 64; bit++ {
		if bound.Has(bit) {
			continue
		}
		err := allThreads(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(bit))
		if errors.Is(err, unix.EINVAL) { // a kernel that does not have it
			break
		}
		if err != nil {
			return fmt.Errorf("drop capability %d from the bounding set: %w", bit, err)
		}
	}
	return nil
}

// Effective returns the capabilities that the calling thread has now.
func Effective() Set {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return 0
	}
	return Set(data[0].Effective) | Set(data[1].Effective)<<32
}

func allThreads(call, a, b uintptr) error {
	_, _, errno := syscall.AllThreadsSyscall6(call, a, b, 0, 0, 0, 0)
	if errno == unix.ENOTSUP {
		return errors.New("this program was built with cgo: build it with CGO_ENABLED=0")
	}
	if errno != 0 {
		return errno
	}
	return nil
}

// MapsNeedCapability reports whether this kernel lets only processes with CAP_BPF use
// BPF maps that they have open, as before Linux 5.19 where kernel.unprivileged_bpf_disabled
// is set. It is for the time before CAP_BPF is dropped.
func MapsNeedCapability() bool {
	runtime.LockOSThread()
	effective, err := setEffective([2]uint32{})
	if err != nil {
		runtime.UnlockOSThread()
		return true
	}
	// The kernel looks at capabilities before it looks at the descriptor.
	const lookup = 1 // BPF_MAP_LOOKUP_ELEM
	attr := struct {
		fd                int32
		_                 uint32
		key, value, flags uint64
	}{fd: -1}
	_, _, errno := unix.Syscall(unix.SYS_BPF, lookup, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if _, err := setEffective(effective); err == nil {
		runtime.UnlockOSThread()
	} // else the thread ends with the goroutine
	return errno == unix.EPERM
}

// setEffective sets which permitted capabilities of the calling thread are effective, and
// returns which were.
func setEffective(to [2]uint32) (was [2]uint32, err error) {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return was, err
	}
	for i := range data {
		was[i], data[i].Effective = data[i].Effective, to[i]
	}
	return was, unix.Capset(&hdr, &data[0])
}
