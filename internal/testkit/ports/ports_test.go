// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"net"
	"strconv"
	"testing"
)

func TestNoPortIsGivenTwiceAndEachIsFree(t *testing.T) {
	seen := make(map[uint16]bool)
	for range 200 {
		p := Free(t)
		if seen[p] {
			t.Fatalf("port %d is given twice", p)
		}
		seen[p] = true
		for _, network := range []string{"tcp4", "tcp6"} {
			l, err := net.Listen(network, net.JoinHostPort("", strconv.Itoa(int(p))))
			if err != nil {
				t.Fatal(err)
			}
			_ = l.Close()
		}
	}
}
