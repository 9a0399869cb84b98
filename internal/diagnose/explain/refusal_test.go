// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"strings"
	"testing"
)

func TestRefusalNext(t *testing.T) {
	for _, c := range []struct{ peer, code, want string }{
		{"vsock 2:4", "token", "host pair"},
		{"unix /run/s", "token", "or neither"},
		{"unix /run/s", "proof", "or neither"},
		{"unix /run/s", "uid", "if this user is meant to connect"},
		{"unix /run/s", "network", "another network namespace"},
	} {
		r := Refusal{Peer: c.peer, Code: c.code}
		if next := r.Next(); !strings.Contains(next, c.want) || strings.Contains(next, "as root") {
			t.Errorf("%s at %s: %s", c.code, c.peer, next)
		}
	}
}
