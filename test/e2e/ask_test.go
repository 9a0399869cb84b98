// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// Doctor needs no agent.
func TestDoctorWithoutAnAgent(t *testing.T) {
	s := newSpace(t)
	config := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(config, []byte("source: [socket, nat]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	none := filepath.Join(t.TempDir(), "none.sock")
	wait.Until(t, "doctor finds what there is", func() error { // it looks within limits of its own
		p := s.start(t, "doctor", "-o", "json", "--config", config, "--control", none)
		<-p.Done()
		if p.ExitCode() != 0 {
			return fmt.Errorf("exit code %d: %s", p.ExitCode(), p.Output())
		}
		r := decode[doctor.Report](t, p.Output())
		want := map[string]doctor.State{
			"agent running": doctor.Warning, "source socket": doctor.OK, "source nat": doctor.OK, "kernel sock_diag": doctor.OK,
			"kernel nf_tables": doctor.OK, "config file": doctor.OK, "nat rules": doctor.OK,
		}
		for _, c := range r.Checks {
			if w, ok := want[c.Area+" "+c.Name]; ok && c.State == w {
				delete(want, c.Area+" "+c.Name)
			}
		}
		if len(want) > 0 || !slices.ContainsFunc(r.Checks, func(c doctor.Check) bool { return c.Area == "observer" && c.Name == "tcp-listen" }) {
			return fmt.Errorf("missing or otherwise: %v in %+v", want, r.Checks)
		}
		return nil
	})
}

func TestDoctorExitStatus(t *testing.T) {
	r := newRig(t)
	r.startAgent()
	r.eventually("the agent answers", func() error { _, err := r.list(); return err })
	r.guest.listen(t, "tcp4", "127.0.0.1:8001")
	r.eventually("a guest that waits for its first host is no failure", func() error {
		out, stderr, code := fairlead(t, "doctor", "--control", r.agentCtl)
		if code != 0 || !strings.Contains(out, "warn  link host") || !strings.Contains(out, "start `fairlead host") {
			return fmt.Errorf("exit code %d, %s%s", code, out, stderr)
		}
		return nil
	})
	r.startHost()
	r.wantState("tcp 127.0.0.1:8001", "active")
	r.host.Kill()
	r.guest.sh(t, "nft 'add table ip why; add chain ip why pre { type nat hook prerouting priority -100; }; add rule ip why pre meta mark 7 tcp dport 8015 dnat to 10.9.0.2'")
	r.eventually("the rule is named", func() error {
		out, stderr, code := fairlead(t, "doctor", "--control", r.agentCtl)
		for _, w := range []string{"FAIL  link host", "start `fairlead host", "th dport 8015", "agent running"} {
			if !strings.Contains(out, w) {
				return fmt.Errorf("no %q in\n%s", w, out)
			}
		}
		if code != 1 || !strings.HasPrefix(stderr, "fairlead: some checks failed") {
			return fmt.Errorf("exit code %d, %s", code, stderr)
		}
		return nil
	})
}

// A watch shows what a restart changed and nothing else.
func TestWatchSurvivesAgentRestart(t *testing.T) {
	r := newRig(t)
	l := r.guest.listen(t, "tcp4", "127.0.0.1:8001")
	r.guest.listen(t, "tcp4", "127.0.0.1:8002")
	r.start()
	r.wantState("tcp 127.0.0.1:8002", "active")
	w := r.guest.start(t, "watch", "--control", r.agentCtl, "--filter", "127.0.0.1")
	r.eventually("watch shows what stands", func() error {
		if n := strings.Count(w.Output(), "present"); n != 2 {
			return fmt.Errorf("%d present in %q", n, w.Output())
		}
		return nil
	})
	r.agent.Stop(syscall.SIGTERM)
	_ = l.Close()
	r.guest.listen(t, "tcp4", "127.0.0.1:8003")
	r.startAgent()
	r.eventually("watch tells what differs", func() error {
		out := w.Output()
		for _, words := range []string{"connection lost", "reconnected", "removed   8001/tcp", "added     8003/tcp"} {
			if !strings.Contains(out, words) {
				return fmt.Errorf("no %q in %q", words, out)
			}
		}
		return nil
	})
	if n := strings.Count(w.Output(), "present"); n != 2 {
		t.Errorf("what stands is told twice: %s", w.Output())
	}
}

func TestLsWaitsForAgentRestart(t *testing.T) {
	r := newRig(t).start()
	r.agent.Stop(syscall.SIGTERM)
	ls := r.guest.start(t, "ls", "--control", r.agentCtl)
	r.startAgent()
	<-ls.Done()
	if code := ls.ExitCode(); code != 0 && !strings.Contains(ls.Output(), "running") {
		t.Errorf("exit code %d: %s", code, ls.Output())
	}
}

func TestCompletionOffersLivePorts(t *testing.T) {
	r := newRig(t)
	r.guest.listen(t, "tcp4", "127.0.0.1:8001")
	r.startAgent()
	r.wantState("tcp 127.0.0.1:8001", "pending")
	r.eventually("the port is offered", func() error { // a shell does not wait long
		out, _, _ := fairlead(t, "__complete", "explain", "--control", r.agentCtl, "")
		if !regexp.MustCompile(`(?m)^8001/tcp\t.+, pending$`).MatchString(out) {
			return fmt.Errorf("%q", out)
		}
		return nil
	})
}

func TestManualPages(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "man")
	if _, stderr, code := fairlead(t, "man", dir); code != 0 {
		t.Fatal(stderr)
	}
	page, err := os.ReadFile(filepath.Join(dir, "fairlead-explain.1"))
	if err != nil || !strings.Contains(string(page), `.TH "FAIRLEAD-EXPLAIN" "1"`) || !strings.Contains(string(page), `\fB--no-dial\fP`) {
		t.Errorf("%v: %s", err, page)
	}
}

func TestConfigCheckNamesPosition(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(path, []byte("holdDown: 1s\nrules:\n- {match: {ports: 80}, acton: deny}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, stderr, code := fairlead(t, "config", "check", path)
	if code != 1 || out != "" {
		t.Errorf("exit code %d, %q", code, out)
	}
	oneLine(t, stderr, path+":3:24", `"acton" (did you mean "action"?)`)
	out, _, code = fairlead(t, "config", "check", "-o", "json", path)
	if code != 1 || !strings.Contains(out, `"ok":false`) || !strings.Contains(out, `"line":3,"column":24`) {
		t.Errorf("exit code %d, %s", code, out)
	}
	if err := os.WriteFile(path, []byte("grace: 1s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, stderr, code := fairlead(t, "config", "check", "--host", path); code != 0 || out != path+": ok, 0 rules\n" {
		t.Errorf("exit code %d, %s%s", code, out, stderr)
	}
}

func TestSystemdNotifications(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	said := make(chan string, 1000)
	go func() {
		defer close(said)
		b := make([]byte, 4096)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			said <- string(b[:n])
		}
	}()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "200000")
	hears := func(want string) (before []string) {
		t.Helper()
		limit := time.After(wait.Limit())
		for {
			select {
			case s := <-said:
				if strings.HasPrefix(s, want) {
					return before
				}
				before = append(before, s)
			case <-limit:
				t.Fatalf("no %q, but %q", want, before)
			}
		}
	}
	r := newRig(t)
	r.guest.listen(t, "tcp4", "127.0.0.1:8001")
	r.startAgent()
	hears("READY=1")
	hears("STATUS=0 of 1 ports")
	hears("WATCHDOG=1")
	if s, _ := r.state("tcp 127.0.0.1:8001"); s != "pending" {
		t.Errorf("ready, and the port is %q", s)
	}
	if code := r.agent.Stop(syscall.SIGTERM); code != 0 {
		t.Error(errors.New("the agent did not end well"))
	}
	hears("STOPPING=1")
}
