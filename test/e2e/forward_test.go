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

// On a conflict a forward that says so opens another port of the host, which ls, explain
// and watch show with the reason, and which remains over a restart of the host.
func TestForwardOnConflict(t *testing.T) {
	r := newRig(t)
	r.start()
	go echoServer(r.guest.listen(t, "tcp4", "0.0.0.0:8080"))
	holder := r.outside.listen(t, "tcp4", "127.0.0.1:8080")
	r.wantState("tcp 0.0.0.0:8080", "conflict")
	if _, stderr, code := fairlead(t, "forward", "add", "8080", "--on-conflict", "next", "--control", r.hostCtl); code != 0 {
		t.Fatal(stderr)
	}
	check := func() {
		t.Helper()
		r.wantState("tcp 0.0.0.0:8080", "active")
		r.eventually("the port is at 8081", func() error { return probe.Want(probe.Data, r.outside.dialer("127.0.0.1:8081"), "hello") })
		for _, control := range []string{r.hostCtl, r.agentCtl} {
			for _, command := range []string{"ls -o wide", "ls -o json", "explain 8080"} {
				out, stderr, _ := fairlead(t, append(strings.Fields(command), "--control", control)...)
				if !strings.Contains(out, "127.0.0.1:8081") || !strings.Contains(out, "instead of host port 8080, which was in use") {
					t.Errorf("%s: %s%s", command, out, stderr)
				}
			}
		}
		if out, _, _ := fairlead(t, "forward", "ls", "--control", r.hostCtl); !strings.Contains(out, "127.0.0.1:8081") {
			t.Errorf("%s", out)
		}
	}
	check()
	_ = holder.Close()
	r.host.stop(syscall.SIGTERM)
	r.startHost()
	check()
	if _, stderr, code := fairlead(t, "forward", "rm", "8080", "--control", r.hostCtl); code != 0 {
		t.Fatal(stderr)
	}
	r.eventually("the port is back", func() error { return probe.Want(probe.Data, r.outside.dialer("127.0.0.1:8080"), "hello") })
}
