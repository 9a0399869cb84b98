// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"net/netip"
	"syscall"

	"golang.org/x/sys/windows"
)

// forbiddenHasHolder says whether somebody in the way can be why the system
// refuses an address.
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

// forbiddenHint says how to get an address that the system refuses: Windows keeps
// ranges of ports to itself (Hyper-V, WinNAT) and lets a process hold one for itself.
func forbiddenHint(netip.AddrPort) string {
	return "access denied: Windows reserves the port, or a process holds it exclusively; see " +
		"\"netsh int ipv4 show excludedportrange\", or remap the port by a rule (hostPort)"
}
