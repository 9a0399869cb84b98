// SPDX-License-Identifier: Apache-2.0

//go:build unix

package link

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// prompt writes to a connection without waiting.
type prompt struct {
	raw syscall.RawConn
	try func(fd uintptr) bool
	b   []byte
	n   int
}

// write sends what conn takes of b at once, and returns how much that was. An
// error is left to a write that waits.
func (p *prompt) write(conn net.Conn, b []byte) int {
	if p.raw == nil {
		sc, ok := conn.(syscall.Conn)
		if !ok {
			return 0
		}
		raw, err := sc.SyscallConn()
		if err != nil {
			return 0
		}
		p.raw, p.try = raw, p.once
	}
	p.b, p.n = b, 0
	_ = p.raw.Write(p.try)
	p.b = nil
	return p.n
}

func (p *prompt) once(fd uintptr) bool {
	n, err := unix.Write(int(fd), p.b)
	for err == unix.EINTR {
		n, err = unix.Write(int(fd), p.b)
	}
	p.n = max(n, 0)
	return true
}
