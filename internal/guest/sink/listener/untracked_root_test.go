// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package listener

import (
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/netns"
)

// takes has rules that hide listeners: they send connections to the loopback to a
// closed port.
const takes = `table inet takes {
	chain out {
		type nat hook output priority -100;
		tcp dport { 80, 81 } dnat ip to 127.0.0.1:9
		tcp dport { 80, 81 } dnat ip6 to [::1]:9
	}
}
`

func TestUntrackedBypassesOutputRules(t *testing.T) {
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	nft := func(stdin string, args ...string) string {
		t.Helper()
		var out []byte
		if err := ns.Do(func() (err error) {
			cmd := exec.Command("nft", args...)
			cmd.Stdin = strings.NewReader(stdin)
			out, err = cmd.CombinedOutput()
			return err
		}); err != nil {
			t.Fatalf("nft %q: %v\n%s", args, err, out)
		}
		return string(out)
	}
	nft(takes, "-f", "-")
	reached := func(at string) bool {
		t.Helper()
		var err error
		_ = ns.Do(func() error {
			var c net.Conn
			if c, err = net.Dial("tcp", at); err == nil {
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				_, err = io.ReadAll(c)
				_ = c.Close()
			}
			return nil
		})
		return err == nil
	}
	all := []string{"127.0.0.1:80", "[::1]:80", "127.0.0.1:81", "[::1]:81"}
	for _, at := range all {
		l, err := ns.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_ = c.Close()
			}
		}()
		t.Cleanup(func() { _ = l.Close(); <-done })
	}
	var u Untracked
	put := func(at string) {
		t.Helper()
		if err := ns.Do(func() error { return u.Put(netip.MustParseAddrPort(at)) }); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(when string, want ...string) {
		t.Helper()
		for _, at := range all {
			wanted := false
			for _, w := range want {
				wanted = wanted || w == at
			}
			if got := reached(at); got != wanted {
				t.Errorf("%s: %s reached: %v", when, at, got)
			}
		}
	}
	expect("before")
	put("127.0.0.1:80")
	put("127.0.0.1:80")
	put("[::1]:80")
	expect("kept", "127.0.0.1:80", "[::1]:80")
	put("[::1]:81")
	if err := u.Remove(netip.MustParseAddrPort("127.0.0.1:80")); err != nil {
		t.Fatal(err)
	}
	expect("one more, one less", "[::1]:80", "[::1]:81")
	// Other programs do not remove it by accident, and it leaves nothing behind.
	nft("flush ruleset\n"+takes, "-f", "-")
	expect("after a flush of all rules", "[::1]:80", "[::1]:81")
	if err := u.Close(); err != nil {
		t.Fatal(err)
	}
	if out := nft("", "list", "tables"); strings.TrimSpace(out) != "table inet takes" {
		t.Errorf("tables after Close: %s", out)
	}
	put("[::1]:81")
	expect("again", "[::1]:81")
	if err := u.Remove(netip.MustParseAddrPort("[::1]:81")); err != nil {
		t.Fatal(err)
	}
	if out := nft("", "list", "tables"); strings.TrimSpace(out) != "table inet takes" {
		t.Errorf("tables without ports: %s", out)
	}
}
