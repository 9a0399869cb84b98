// SPDX-License-Identifier: Apache-2.0

package forward

import "net"

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

// closeOrderly closes c and lets the kernel deliver what was written.
func closeOrderly(c net.Conn) {
	if l, ok := c.(lingerer); ok {
		_ = l.SetLinger(-1)
	}
	_ = c.Close()
}
