// SPDX-License-Identifier: Apache-2.0

package gvproxy

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// The peer's list of forwards, and its errors: an entry that is understood is one address
// and port, which the peer is asked to remove by the same words.
func FuzzForwards(f *testing.F) {
	f.Add([]byte(`[{"local":"127.0.0.1:8080","remote":"192.168.127.2:8080","protocol":"tcp"},{"local":":53","protocol":"udp"}]`))
	f.Add([]byte(`[{"local":"/tmp/podman.sock","remote":"ssh-tunnel://root@192.168.127.2:22","protocol":"unix"}]`))
	f.Add([]byte(`[{"local":"[::]:80","protocol":"tcp"},{"local":"localhost:1","protocol":"tcp"},{"local":"[fe80::1%eth0]:1","protocol":"tcp"}]`))
	f.Add([]byte("proxy already running\nlisten tcp 127.0.0.1:80: bind: address already in use"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if line := firstLine(b); len(line) > 203 || strings.ContainsAny(line, "\x00\r\n\x1b\x7f") || !utf8.ValidString(line) {
			t.Errorf("line %q", line)
		}
		all, err := decodeForwards(b)
		if err != nil {
			return
		}
		for _, e := range all {
			target, ok := parse(e)
			if !ok {
				continue
			}
			if target.Host.Is4In6() {
				t.Errorf("%+v is %+v", e, target)
			}
			again, ok := parse(forward{Local: target.AddrPort().String(), Protocol: target.Protocol.String()})
			if !ok || again != target {
				t.Errorf("%+v is %+v, read again as %+v", e, target, again)
			}
		}
	})
}
