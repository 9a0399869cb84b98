// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package e2e

import (
	"strings"
	"testing"
)

// TestAgeOfFoundPort: what was open before the agent started has a lower bound as its age.
func TestAgeOfFoundPort(t *testing.T) {
	r := newRig(t)
	_ = r.guest.listen(t, "tcp4", "0.0.0.0:7000")
	r.start()
	_ = r.guest.listen(t, "tcp4", "0.0.0.0:7001")
	for number, want := range map[string]bool{"7000": true, "7001": false} {
		key := "tcp 0.0.0.0:" + number
		r.wantState(key, "active")
		if _, p := r.state(key); p.SinceAtLeast != want {
			t.Errorf("%s: a lower bound: %v, want %v", key, p.SinceAtLeast, want)
		}
		out, _, _ := fairlead(t, "ls", "--no-headers", "--control", r.agentCtl, "--filter", "port="+number)
		if strings.Contains(out, ">") != want {
			t.Errorf("ls of %s:\n%s", key, out)
		}
	}
}
