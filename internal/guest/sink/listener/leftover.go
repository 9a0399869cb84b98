// SPDX-License-Identifier: Apache-2.0

package listener

import "github.com/fairlead/fairlead/internal/port/procnet"

// leftOver reports whether there are TCP connections at a local port. Those of an
// earlier listener keep a new one from binding, unless it asks to reuse the address.
func leftOver(p uint16) bool {
	// thread-self: another thread may be in another network namespace.
	return connectionsAt("/proc/thread-self/net/tcp", p) || connectionsAt("/proc/thread-self/net/tcp6", p)
}

// connectionsAt reports whether there are connections at a local port in a table of TCP.
// What cannot be read has none: without IPv6 there is no tcp6.
func connectionsAt(table string, p uint16) (found bool) {
	_ = procnet.Read(table, func(s procnet.Socket) {
		found = found || s.Local.Port() == p && s.State != procnet.Listen
	})
	return found
}
