// SPDX-License-Identifier: Apache-2.0

//go:build unix

package own

import "syscall"

const errInUse = syscall.EADDRINUSE

// acceptErrors are the errors of accept(2), section "Error handling", that leave the
// listener usable.
var acceptErrors = map[syscall.Errno]acceptError{
	syscall.EMFILE:       shortage,
	syscall.ENFILE:       shortage,
	syscall.ENOBUFS:      shortage,
	syscall.ENOMEM:       shortage,
	syscall.ENETDOWN:     shortage,
	syscall.EPERM:        shortage,
	syscall.ECONNABORTED: connectionError,
	syscall.ECONNRESET:   connectionError,
	syscall.EPROTO:       connectionError,
	syscall.ENOPROTOOPT:  connectionError,
	syscall.EHOSTUNREACH: connectionError,
	syscall.ENETUNREACH:  connectionError,
}
