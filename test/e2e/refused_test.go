// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// A host that the agent refuses is named by every command that a user would ask.
func TestRefusedHostIsShown(t *testing.T) {
	r := newRig(t)
	r.guest.listen(t, "tcp4", "127.0.0.1:8001")
	token := func(name string) string {
		path := filepath.Join(r.dir, name)
		if err := os.WriteFile(path, []byte(strings.Repeat(name, 32)), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	r.token = token("a")
	r.startAgent()
	r.token = token("b")
	r.startHost()
	r.agent.Prints("peer refused")
	for _, c := range []struct {
		args []string
		code int
	}{
		{[]string{"ls"}, 0},
		{[]string{"explain", "8001"}, 1},
		{[]string{"doctor"}, 1},
	} {
		wait.Until(t, strings.Join(c.args, " ")+" names the refusal", func() error {
			out, stderr, code := fairlead(t, append(c.args, "--control", r.agentCtl)...)
			for _, w := range []string{"a host was refused", "ago: the tokens of agent and host differ", "or neither of them"} {
				if !strings.Contains(out, w) {
					return fmt.Errorf("no %q in %s%s", w, out, stderr)
				}
			}
			if code != c.code {
				return fmt.Errorf("exit code %d", code)
			}
			return nil
		})
	}
	for _, args := range [][]string{{"ls"}, {"explain", "8001"}, {"doctor", "--host"}} {
		wait.Until(t, strings.Join(args, " ")+" on the host says what to do", func() error {
			out, stderr, _ := fairlead(t, append(args, "--control", r.hostCtl)...)
			if text := strings.Join(strings.Fields(out), " "); !strings.Contains(text, "tokens of agent and host differ") || !strings.Contains(text, "or neither of them") {
				return fmt.Errorf("%s%s", out, stderr)
			}
			return nil
		})
	}
	r.host.Kill()
	r.token = token("a")
	r.startHost()
	r.wantState("tcp 127.0.0.1:8001", "active")
	if out, _, _ := fairlead(t, "ls", "--control", r.agentCtl); strings.Contains(out, "refused") {
		t.Errorf("a host is connected, and still:\n%s", out)
	}
}

// In one network namespace the host would publish what it opens itself, and flows would
// return to it.
func TestSharedNetworkIsRefused(t *testing.T) {
	r := newRig(t)
	r.outside = r.guest
	r.guest.listen(t, "tcp4", "127.0.0.1:8001")
	r.startAgent()
	r.startHost()
	for _, c := range []struct {
		args    []string
		control string
	}{
		{[]string{"ls"}, r.agentCtl}, {[]string{"explain", "8001"}, r.agentCtl}, {[]string{"doctor"}, r.agentCtl},
		{[]string{"ls"}, r.hostCtl}, {[]string{"explain", "8001"}, r.hostCtl}, {[]string{"doctor", "--host"}, r.hostCtl},
	} {
		wait.Until(t, fmt.Sprint(c.args, " names the refusal"), func() error {
			out, stderr, _ := fairlead(t, append(c.args, "--control", c.control)...)
			if text := strings.Join(strings.Fields(out), " "); !strings.Contains(text, "agent and host share one network namespace") {
				return fmt.Errorf("%s%s", out, stderr)
			}
			return nil
		})
	}
	r.outside = newSpace(t)
	r.host.Kill()
	r.startHost()
	r.wantState("tcp 127.0.0.1:8001", "active")
}

// While the guest is away its ports are open for a while, and do not answer.
func TestHostWithoutItsGuest(t *testing.T) {
	r := newRig(t)
	r.hostFlags = []string{"--grace", "10m"}
	r.guest.listen(t, "tcp4", "127.0.0.1:8001")
	r.start()
	r.wantState("tcp 127.0.0.1:8001", "active")
	if _, stderr, code := fairlead(t, "explain", "8001", "--control", r.hostCtl); code != 0 {
		t.Errorf("with its guest: %d, %s", code, stderr)
	}
	r.agent.Kill()
	wait.Until(t, "the host reports that its guest is away", func() error {
		out, _, code := fairlead(t, "explain", "8001", "--control", r.hostCtl)
		if code != 1 || !strings.Contains(out, "8001/tcp does not answer on the host: guest") {
			return fmt.Errorf("exit code %d, %s", code, out)
		}
		if out, _, _ = fairlead(t, "ls", "--control", r.hostCtl); !strings.Contains(out, "lost") || !strings.Contains(out, "is not connected for") {
			return fmt.Errorf("ls: %s", out)
		}
		return nil
	})
	r.outside.start(t, "watch", "--control", r.hostCtl).Prints("is not connected for", "present   8001/tcp", "lost")
}

// By default `explain --rules` applies the rules of the agent or host that answers.
func TestRulesOfTheRunningAgent(t *testing.T) {
	r := newRig(t)
	rules := filepath.Join(r.dir, "rules.yaml")
	if err := os.WriteFile(rules, []byte("rules: [{name: no-debug, match: {ports: 9229}, action: deny}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.agentFlags = []string{"--rules-file", rules}
	r.start()
	out, stderr, code := fairlead(t, "explain", "--rules", "9229", "--control", r.agentCtl)
	if code != 0 || !strings.Contains(out, "denied by rule 1 (no-debug)") {
		t.Errorf("exit code %d, %s%s", code, out, stderr)
	}
	fairlead(t, "deny", "8080", "--control", r.hostCtl)
	out, stderr, code = fairlead(t, "explain", "--rules", "8080", "--control", r.hostCtl)
	if code != 0 || !strings.Contains(out, "denied by host runtime rule 1 (deny 8080/tcp)") {
		t.Errorf("of a host: exit code %d, %s%s", code, out, stderr)
	}
	fairlead(t, "forward", "add", "web:80", "--to", "18080", "--control", r.agentCtl)
	for at, want := range map[string]string{
		"web:80": "127.0.0.1:18080 (runtime rule 1 (forward web:80/tcp))", "api:80": "127.0.0.1:80 (default)", "svc/default/web:80": "127.0.0.1:80 (default)",
	} {
		out, stderr, code = fairlead(t, "explain", "--rules", at, "--control", r.agentCtl)
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("%s: exit code %d, %s%s", at, code, out, stderr)
		}
	}
	if _, stderr, code = fairlead(t, "explain", "--rules", "web:80", "--source", "socket", "--control", r.agentCtl); code != 2 || !strings.Contains(stderr, "--source") {
		t.Errorf("of another source: exit code %d, %s", code, stderr)
	}
}

// The settings are those in effect, whatever files and variables say by now.
func TestConfigShowOfARunningAgent(t *testing.T) {
	r := newRig(t, "--hold-down", "1s")
	r.start()
	for control, want := range map[string]string{r.agentCtl: "holdDown 1s --hold-down", r.hostCtl: "grace 10s default"} {
		out, stderr, code := fairlead(t, "config", "show", "--control", control)
		if code != 0 || !strings.Contains(strings.Join(strings.Fields(out), " "), want) {
			t.Errorf("exit code %d, no %q in %s%s", code, want, out, stderr)
		}
	}
}
