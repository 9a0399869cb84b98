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

// Every code has advice on the side that sees it, and the host's is for the host.
func TestNextOnHost(t *testing.T) {
	for _, c := range []struct {
		code, endpoint string
		remote         bool
		want           string
	}{
		{"token", "vsock://3:1023", true, "host pair"},
		{"proof", "unix:///run/s", true, "or neither"},
		{"uid", "unix:///run/s", true, "--allow-uids"},
		{"uid", "unix:///run/s", false, "as the user of `fairlead host`"},
		{"permission", "unix:///run/s", false, "--allow-uids"},
		{"role", "unix:///run/s", true, "another host peer"},
		{"replaced", "unix:///run/s", true, "other host"},
		{"no-machine", "vsock://3:1023", false, "if it has another CID now"},
	} {
		if next := NextOnHost(c.code, c.endpoint, c.remote, ""); !strings.Contains(next, c.want) {
			t.Errorf("%s at %s: %s", c.code, c.endpoint, next)
		}
	}
	for _, code := range []string{"", "other"} {
		if next := NextOnHost(code, "unix:///run/s", false, ""); !strings.Contains(next, "start the guest") {
			t.Errorf("code %q: %s", code, next)
		}
	}
	for _, code := range []string{"token", "proof", "token-file"} {
		if next := NextOnHost(code, "vsock://3:1023", true, "dev"); !strings.Contains(next, "`fairlead host pair --guest dev`") {
			t.Errorf("code %q of a guest with a name: %s", code, next)
		}
	}
}
