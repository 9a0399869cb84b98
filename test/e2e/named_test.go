// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// Guests that have names in the configuration are shown by these.
func TestNamedGuests(t *testing.T) {
	r, other := newRig(t), newRig(t)
	r.connect = "dev=" + r.link
	r.hostFlags = []string{"--connect", "lab=" + other.link, "--grace", "1h"}
	r.guest.listen(t, "tcp4", "0.0.0.0:7000")
	other.guest.listen(t, "tcp4", "0.0.0.0:7001")
	other.startAgent()
	r.start()
	ask := func(wants []string, args ...string) {
		t.Helper()
		r.eventually(fmt.Sprintf("%q shows %q", args, wants), func() error {
			out, stderr, _ := fairlead(t, append(args, "--control", r.hostCtl)...)
			for _, w := range wants {
				if !strings.Contains(out, w) {
					return fmt.Errorf("no %q in %s%s", w, out, stderr)
				}
			}
			if strings.Contains(out, "unix://") != (args[0] == "doctor") { // which says where they are
				return errors.New(out)
			}
			return nil
		})
	}
	ask([]string{"GUEST", " dev\n", " lab\n"}, "ls")
	ask([]string{"tcp 0.0.0.0:7000 of guest dev: active"}, "explain", "7000")
	ask([]string{"guest link", "dev at unix://" + filepath.Join(r.dir, "link", "s")}, "doctor", "--host")
	w := r.guest.start(t, "watch", "--control", r.hostCtl)
	r.eventually("watch names the guests", func() error {
		if out := w.Output(); !strings.Contains(out, "guest dev\n") || !strings.Contains(out, "guest lab\n") {
			return errors.New(out)
		}
		return nil
	})
	other.agent.Kill()
	ask([]string{"  lost  ", "guest lab is not connected"}, "ls")
	ask([]string{"guest lab is not connected"}, "explain", "7001")
}
