// SPDX-License-Identifier: Apache-2.0

package own

import (
	"context"
	"errors"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// ListenExclusive is Listen with "tcp", "tcp4" or "tcp6" at an address that
// nobody else has. The net package asks to reuse the address, and with that
// bind(2) also succeeds beside a socket of the same wish that is bound and does
// not listen yet, which could then no longer do so (inet_csk_bind_conflict in
// net/ipv4/inet_connection_sock.c). This one fails with EADDRINUSE there, and
// where connections of an earlier listener are left over.
//
// Its own connections do not keep the port from a later server that asks to
// reuse the address.
func (s *Sockets) ListenExclusive(ctx context.Context, network, address string) (net.Listener, error) {
	ln, err := s.listen(ctx, network, address, func(c syscall.RawConn) error { return reuse(c, 0) })
	if err != nil {
		return nil, err
	}
	c, err := ln.SyscallConn()
	if err == nil {
		err = reuse(c, 1)
	}
	if err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	return ln, nil
}

func reuse(c syscall.RawConn, on int) error {
	var err error
	if cerr := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, on)
	}); cerr != nil {
		return cerr
	}
	return os.NewSyscallError("setsockopt SO_REUSEADDR", err)
}
