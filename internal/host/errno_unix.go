// SPDX-License-Identifier: Apache-2.0

//go:build unix

package host

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"syscall"
)

// forbiddenHasHolder is whether the system also denies permission for an address
// that another process holds.
const forbiddenHasHolder = false

func kindOf(err error) listenError {
	if errors.Is(err, errTaken) {
		return inUse
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return otherError
	}
	switch errno {
	case syscall.EADDRINUSE:
		return inUse
	case syscall.EACCES, syscall.EPERM:
		return forbidden
	case syscall.EADDRNOTAVAIL, syscall.EAFNOSUPPORT:
		return noAddress
	}
	return otherError
}

// forbiddenHint says how to get permission for an address, or what else to do.
func forbiddenHint(addr netip.AddrPort, other string) string {
	switch {
	case addr.Port() >= 1024:
		return "permission denied"
	case runtime.GOOS == "linux":
		return fmt.Sprintf("permission denied: grant CAP_NET_BIND_SERVICE, lower sysctl "+
			"net.ipv4.ip_unprivileged_port_start to %d, or %s", addr.Port(), other)
	}
	return "permission denied: run as root, or " + other
}
