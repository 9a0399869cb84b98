// SPDX-License-Identifier: Apache-2.0

package own

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// cookieOf reads SO_COOKIE (sock_gen_cookie in net/core/sock_diag.c, Linux 4.12),
// which gives the socket its cookie if it has none yet.
func cookieOf(c syscall.RawConn) (uint64, error) {
	var cookie uint64
	var err error
	if cerr := c.Control(func(fd uintptr) {
		cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE)
	}); cerr != nil {
		return 0, cerr
	}
	return cookie, os.NewSyscallError("getsockopt SO_COOKIE", err)
}
