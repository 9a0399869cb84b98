// SPDX-License-Identifier: Apache-2.0

package own

import (
	"syscall"

	"golang.org/x/sys/windows"
)

const errInUse = windows.WSAEADDRINUSE

// acceptErrors are the errors of AcceptEx that leave the listener usable. They have
// Winsock's numbers, not those of package syscall, which it makes up.
var acceptErrors = map[syscall.Errno]acceptError{
	windows.WSAEMFILE:                 shortage,
	windows.WSAENOBUFS:                shortage,
	windows.WSAENETDOWN:               shortage,
	windows.WSAECONNABORTED:           connectionError,
	windows.WSAECONNRESET:             connectionError,
	windows.WSAENETRESET:              connectionError,
	windows.WSAEHOSTUNREACH:           connectionError,
	windows.WSAENETUNREACH:            connectionError,
	syscall.ERROR_NETNAME_DELETED:     connectionError,
	windows.ERROR_NO_SYSTEM_RESOURCES: shortage,
	windows.ERROR_NOT_ENOUGH_MEMORY:   shortage,
	windows.ERROR_TOO_MANY_OPEN_FILES: shortage,
}
