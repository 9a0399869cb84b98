// SPDX-License-Identifier: Apache-2.0

//go:build !windows

package forward

import "syscall"

// errConnReset is the system's error of a connection that the peer has reset.
const errConnReset = syscall.ECONNRESET
