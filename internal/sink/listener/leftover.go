// SPDX-License-Identifier: Apache-2.0

package listener

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"
)

// leftOver reports whether there are TCP connections at a local port. Those of an
// earlier listener keep a new one from binding, unless it asks to reuse the address.
func leftOver(p uint16) bool {
	for _, name := range []string{"tcp", "tcp6"} {
		// thread-self: another thread may be in another network namespace.
		f, err := os.Open("/proc/thread-self/net/" + name)
		if err != nil {
			continue // without IPv6 there is no tcp6
		}
		found := connectionsAt(f, p)
		_ = f.Close()
		if found {
			return true
		}
	}
	return false
}

// connectionsAt reads a table of /proc/net (get_tcp4_sock and get_timewait4_sock
// in net/ipv4/tcp_ipv4.c).
func connectionsAt(r io.Reader, p uint16) bool {
	const listen = "0A"
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) < 4 || f[3] == listen {
			continue
		}
		_, local, ok := strings.Cut(f[1], ":")
		n, err := strconv.ParseUint(local, 16, 16)
		if ok && err == nil && uint16(n) == p {
			return true
		}
	}
	return false
}
