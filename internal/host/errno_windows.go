// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"net/netip"
	"syscall"

	"golang.org/x/sys/windows"
)

// forbiddenHasHolder is whether the system also denies permission for an address
// that another process holds.
const forbiddenHasHolder = true

func kindOf(err error) listenError {
	if errors.Is(err, errTaken) {
		return inUse
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return otherError
	}
	switch errno {
	case windows.WSAEADDRINUSE:
		return inUse
	case windows.WSAEACCES:
		return forbidden
	case windows.WSAEADDRNOTAVAIL, windows.WSAEAFNOSUPPORT:
		return noAddress
	}
	return otherError
}

// forbiddenHint says how to get permission for an address, or what else to do. Windows reserves ranges of
// ports (Hyper-V, WinNAT), and a process can hold a port exclusively.
func forbiddenHint(_ netip.AddrPort, other string) string {
	return "access denied: Windows reserves the port, or a process holds it exclusively; see " +
		"\"netsh int ipv4 show excludedportrange\", or " + other
}
