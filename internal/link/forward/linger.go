// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"net"
	"strings"
	"syscall"
)

// lingerer is a TCP connection.
type lingerer interface{ SetLinger(sec int) error }

// Abortive makes a TCP connection end by a reset when it is closed, and does
// nothing to others. It is for connections that are relayed, from accept or dial
// on: when a process is killed, the kernel closes its sockets, and a plain close
// would end a truncated transfer like a complete one. Splice lifts it when both
// directions ended in order.
func Abortive(c net.Conn) {
	if l, ok := c.(lingerer); ok {
		_ = l.SetLinger(0)
	}
}

// AbortiveDial is Abortive for a net.Dialer, as its Control: also a connection that was
// made and never returned, because its attempt was given up or the process was killed, ends
// by a reset.
func AbortiveDial(network, _ string, c syscall.RawConn) error {
	if !strings.HasPrefix(network, "tcp") {
		return nil
	}
	return c.Control(func(fd uintptr) { abortOnClose(fd) })
}

// CloseOrderly closes c, also if it is Abortive, and lets the kernel deliver what was
// written.
func CloseOrderly(c net.Conn) {
	if l, ok := c.(lingerer); ok {
		_ = l.SetLinger(-1)
	}
	_ = c.Close()
}
