// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"io"
	"os/exec"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/source/nat"
)

// owner is a program that owns a table until it ends.
func (w *world) owner(rules string) (end func()) {
	w.t.Helper()
	cmd := exec.Command("ip", "netns", "exec", w.name, "nft", "-i")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	if _, err := io.WriteString(stdin, rules); err != nil {
		w.t.Error(err)
	}
	return func() {
		_ = stdin.Close()
		if err := cmd.Wait(); err != nil {
			w.t.Error(err)
		}
	}
}

// The kernel does not notify of a table that is removed with its owner, not even another
// generation. One that is made anew in its place has none of its rules.
func TestOwnedTableIsFollowed(t *testing.T) {
	w := newWorld(t)
	// Not looked at by an audit, which would be right to repair what it finds just
	// before a table that went is missed.
	all := w.startMethods(nat.Options{Audit: time.Hour})
	const chain = "add table ip o { flags owner; }\nadd chain ip o pre { type nat hook prerouting priority -100; }\n"
	end := w.owner(chain + "add rule ip o pre tcp dport 80 dnat to 10.0.0.1\n")
	expectAll(t, all, "owned", "tcp 0.0.0.0:80 [ip o] 10.0.0.1:80")
	end()
	expectAll(t, all, "the owner has ended")
	end = w.owner(chain + "add rule ip o pre tcp dport 81 dnat to 10.0.0.1\n")
	expectAll(t, all, "owned again", "tcp 0.0.0.0:81 [ip o] 10.0.0.1:81")
	end()
	end = w.owner(chain + "add rule ip o pre tcp dport 82 dnat to 10.0.0.1\n")
	expectAll(t, all, "another owner at once", "tcp 0.0.0.0:82 [ip o] 10.0.0.1:82")
	end()
	expectAll(t, all, "both have ended")
	for _, x := range all {
		if st := x.src.Status(); st.Drift != 0 {
			t.Errorf("%s: drift %d", x.method, st.Drift)
		}
	}
}
