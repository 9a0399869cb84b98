// SPDX-License-Identifier: Apache-2.0

package link

import (
	"net"

	"golang.org/x/sys/unix"
)

// peerUID returns the effective user at the other end (LOCAL_PEERCRED).
func peerUID(c *net.UnixConn) (uid uint32, known bool, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, false, err
	}
	var cred *unix.Xucred
	var serr error
	err = raw.Control(func(fd uintptr) {
		cred, serr = unix.GetsockoptXucred(int(fd), unix.SOL_LOCAL, unix.LOCAL_PEERCRED)
	})
	if err != nil {
		return 0, false, err
	}
	if serr != nil {
		return 0, false, serr
	}
	return cred.Uid, true, nil
}
