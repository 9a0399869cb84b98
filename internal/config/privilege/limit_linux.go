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
// cannot be regained.
//
// The bounding set stays. It limits what a program may gain by execve(2), and with
// no_new_privs that is nothing. To reduce it takes a call for each capability, and each
// call stops all threads.
//
// A program that is built with cgo keeps what it has and gets an error, because Go can
// change all threads only without.
func Limit(keep Set) error {
	hdr := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if err := unix.Capget(hdr, &has[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	confined, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	if err != nil || confined == 0 {
		if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
			return fmt.Errorf("set no_new_privs: %w", cgoError(errno))
		}
	}
	data := &[2]unix.CapUserData{} // without inheritable ones, the kernel drops ambient ones too
	for i := range data {
		data[i].Permitted = has[i].Permitted & uint32(keep>>(32*i))
		data[i].Effective = data[i].Permitted
	}
	if *data == has {
		return nil
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(hdr)), uintptr(unsafe.Pointer(data)), 0); errno != 0 {
		return fmt.Errorf("drop capabilities: %w", cgoError(errno))
	}
	return nil
}

// cgoError explains the error of a program that was built with cgo.
func cgoError(errno syscall.Errno) error {
	if errno == unix.ENOTSUP {
		return errors.New("this program was built with cgo: build it with CGO_ENABLED=0")
	}
	return errno
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
