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
// no other socket has. The net package sets SO_REUSEADDR, with which bind(2) also
// succeeds beside a socket that has it, is bound, and does not listen yet; that one
// could then not listen any more (inet_csk_bind_conflict in
// net/ipv4/inet_connection_sock.c). This one fails with EADDRINUSE there, and
// where connections of an earlier listener remain.
//
// Its own connections do not keep a later server with SO_REUSEADDR from the port.
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
