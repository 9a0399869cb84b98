// SPDX-License-Identifier: Apache-2.0

package forward

import "syscall"

// errConnReset is the system's error of a connection that the peer has reset.
const errConnReset = syscall.WSAECONNRESET

// abortOnClose makes a TCP connection end by a reset when it is closed.
func abortOnClose(fd uintptr) {
	_ = syscall.SetsockoptLinger(syscall.Handle(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
}
