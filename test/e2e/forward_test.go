// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/test/kit/probe"
)

// Forwards that are added on the host or in the guest lead clients to the server, survive
// restarts of both, and are undone. What is paused or denied is closed to clients.
func TestForwardsAtRunTime(t *testing.T) {
	r := newRig(t)
	r.start()
	go echoServer(r.guest.listen(t, "tcp4", "0.0.0.0:8080"))
	r.wantState("tcp 0.0.0.0:8080", "active")
	run := func(control string, args ...string) string {
		t.Helper()
		out, stderr, code := fairlead(t, append(args, "--control", control)...)
		if code != 0 {
			t.Fatalf("%q: exit %d, %s", args, code, stderr)
		}
		return out
	}
	open := func(ports ...int) {
		t.Helper()
		r.eventually(fmt.Sprintf("clients reach %v only", ports), func() error {
			for _, n := range []int{8080, 18080, 28080} {
				want := false
				for _, p := range ports {
					want = want || p == n
				}
				dial := r.outside.dialer(fmt.Sprintf("127.0.0.1:%d", n))
				err := probe.WantClosed(dial)
				if want {
					err = probe.Want(probe.Data, dial, "hello")
				}
				if err != nil {
					return fmt.Errorf("port %d: %w", n, err)
				}
			}
			return nil
		})
	}
	restart := func() {
		t.Helper()
		r.agent.stop(syscall.SIGTERM)
		r.startAgent()
		r.host.stop(syscall.SIGTERM)
		r.startHost()
	}
	open(8080)
	run(r.agentCtl, "forward", "add", "8080", "--to", "18080")
	open(18080)
	restart()
	open(18080)
	run(r.hostCtl, "forward", "add", "8080", "--to", "28080")
	open(28080)
	run(r.hostCtl, "deny", "8080")
	open()
	restart()
	open()
	run(r.hostCtl, "allow", "8080")
	open(28080)
	run(r.agentCtl, "forward", "pause", "--all")
	open()
	run(r.agentCtl, "forward", "resume", "--all")
	open(28080)
	run(r.hostCtl, "forward", "rm", "8080")
	open(18080)
	if out := run(r.agentCtl, "forward", "ls", "-o", "json"); !strings.Contains(out, filepath.Join(r.dir, "forwards.yaml")) {
		t.Errorf("%s", out)
	}
	run(r.agentCtl, "forward", "rm", "8080")
	open(8080)
}
