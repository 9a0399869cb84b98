// SPDX-License-Identifier: Apache-2.0

package link

import (
	"net"

	"golang.org/x/sys/unix"
)

// peerUID returns the user at the other end (SO_PEERCRED): of a dialled socket
// the one that called listen, of an accepted one the one that called connect.
func peerUID(c *net.UnixConn) (uid uint32, known bool, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, false, err
	}
	var cred *unix.Ucred
	var serr error
	err = raw.Control(func(fd uintptr) {
		cred, serr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err != nil {
		return 0, false, err
	}
	if serr != nil {
		return 0, false, serr
	}
	return cred.Uid, true, nil
}
