// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package kernels says what tests may expect of the kernel that they run on.
package kernels

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Variable is set in the machines of test/vm, to the release of their kernel.
const Variable = "FAIRLEAD_KERNEL"

// fentry is the method that not all kernels of test/vm have.
const fentry = "fentry"

// MPTCP returns the protocol number of MPTCP, or that of TCP where the kernel has no MPTCP,
// as WSL's and those before Linux 5.6.
var MPTCP = sync.OnceValue(func() int {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP)
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ENOPROTOOPT) {
		return unix.IPPROTO_TCP
	}
	if err == nil {
		_ = unix.Close(fd)
	}
	return unix.IPPROTO_MPTCP
})

// Must reports whether this kernel must take a method, as those of test/vm do.
func Must(method string) bool {
	release := os.Getenv(Variable)
	return release != "" && has(runtime.GOARCH, release, method)
}

// Fentry reports whether this kernel attaches programs to its functions directly, which is
// known of those of test/vm, and assumed of others.
func Fentry() bool { return has(runtime.GOARCH, os.Getenv(Variable), fentry) }

// Before reports whether this kernel is older than a version.
func Before(major, minor int) bool {
	var u unix.Utsname
	var m, n int
	if err := unix.Uname(&u); err != nil {
		return false
	}
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &m, &n); err != nil {
		return false
	}
	return m < major || m == major && n < minor
}

// BuiltIn reports whether a part of the kernel is in it, as most of netfilter in WSL's, and
// not a module.
func BuiltIn(module string) (bool, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return false, err
	}
	list, err := os.ReadFile("/lib/modules/" + unix.ByteSliceToString(u.Release[:]) + "/modules.builtin")
	return strings.Contains(string(list), "/"+module+".ko\n"), err
}

// Best returns the first of the methods that a kernel of test/vm must take; the first one
// elsewhere.
func Best(methods ...string) string {
	if i := slices.IndexFunc(methods, Must); i > 0 {
		return methods[i]
	}
	return methods[0]
}

// has reports whether a release of Debian's has a method: arm64 got fentry in Linux 6.4
// (DYNAMIC_FTRACE_WITH_DIRECT_CALLS).
func has(arch, release, method string) bool {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return true
	}
	return method != fentry || arch != "arm64" || major > 6 || major == 6 && minor >= 4
}
