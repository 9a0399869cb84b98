// SPDX-License-Identifier: Apache-2.0

package link

import (
	"fmt"
	"net"
	"os"
)

// EnsureDir makes the directory of a unix socket with mode 0700 if it is missing. One that
// is there must belong to root or to this process's user, and others may not write to it:
// who can, puts a socket of their own into the place of ours.
func EnsureDir(dir string) error {
	_, err := ensureDir(dir)
	return err
}

// TrustedPeer returns an error if the process at the other end of a unix socket runs as
// another user than root and this process's. Where the system does not know the user
// (Windows), the socket's access list must do.
func TrustedPeer(conn net.Conn) error {
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return nil
	}
	uid, known, err := peerUID(uc)
	switch {
	case err != nil:
		return fmt.Errorf("the peer's user is not known: %w", err)
	case known && uid != 0 && int(uid) != os.Geteuid():
		return fmt.Errorf("the process at the other end runs as uid %d: want %s", uid, allowedUsers(nil))
	}
	return nil
}
