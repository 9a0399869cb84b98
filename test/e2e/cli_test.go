// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
	"github.com/fairlead/fairlead/test/kit/usage"
)

// oneLine checks that an error is one line that names what it is about.
func oneLine(t *testing.T, stderr string, names ...string) {
	t.Helper()
	line := strings.TrimSuffix(stderr, "\n")
	if strings.Contains(line, "\n") || !strings.HasPrefix(line, "fairlead: ") {
		t.Errorf("stderr is not one line of fairlead's: %q", stderr)
	}
	for _, n := range names {
		if !strings.Contains(line, n) {
			t.Errorf("%q does not name %q", line, n)
		}
	}
}

func TestBadInput(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	misspelt := file("misspelt.yaml", "hold-dwon: 1s\n")
	broken := file("broken.yaml", "rules: [\n")
	for _, c := range []struct {
		name  string
		args  []string
		code  int
		names []string
	}{
		{"unknown command", []string{"agnet"}, 2, []string{"agnet", "agent"}},
		{"unknown flag", []string{"agent", "--frobnicate"}, 2, []string{"frobnicate"}},
		{"bad value", []string{"agent", "--hold-down", "soon"}, 2, []string{"hold-down", "soon"}},
		{"bad mode", []string{"agent", "--observer", "guess"}, 2, []string{"guess", "auto"}},
		{"bad link", []string{"agent", "--link", "tcp://1.2.3.4:5"}, 2, []string{"tcp://1.2.3.4:5", "unix", "vsock"}},
		{"extra argument", []string{"ls", "x"}, 2, []string{`"x"`}},
		{"bad output", []string{"ls", "-o", "xml"}, 2, []string{"xml", "json"}},
		{"no such config", []string{"agent", "--config", dir + "/none.yaml"}, 2, []string{"none.yaml"}},
		{"misspelt key", []string{"agent", "--config", misspelt}, 2, []string{"misspelt.yaml:1:1", "hold-dwon", "holdDown"}},
		{"broken config", []string{"agent", "--config", broken}, 2, []string{"broken.yaml"}},
		{"nothing runs", []string{"ls", "--control", dir + "/none.sock"}, 1, []string{"none.sock", "running"}},
		{"watch nothing", []string{"watch", "--control", dir + "/none.sock"}, 1, []string{"none.sock", "running"}},
		{"bad port", []string{"explain", "--rules", "70000"}, 2, []string{"70000", "65535"}},
		{"bad protocol", []string{"explain", "--rules", "80/sctp"}, 2, []string{"sctp"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, stderr, code := fairlead(t, c.args...)
			if code != c.code || out != "" {
				t.Errorf("exit code %d, want %d; stdout %q", code, c.code, out)
			}
			oneLine(t, stderr, c.names...)
		})
	}
}

func TestMetricsPortInUse(t *testing.T) {
	r := newRig(t, "--metrics-addr", "127.0.0.1:9111")
	r.guest.listen(t, "tcp4", "127.0.0.1:9111")
	r.startAgent()
	<-r.agent.Done()
	if code := r.agent.ExitCode(); code != 1 {
		t.Errorf("exit code %d", code)
	}
	oneLine(t, r.agent.Output(), "127.0.0.1:9111", "in use")
}

func TestAgentWithoutPrivilege(t *testing.T) {
	r := newRig(t)
	for _, mode := range []string{"bpf"} {
		cmd := []string{"agent", "--observer", mode, "--link", r.link, "--control", r.agentCtl}
		p := r.guest.startAs(t, 65534, cmd...)
		<-p.Done()
		if p.ExitCode() != 1 {
			t.Errorf("%s: exit code %d", mode, p.ExitCode())
		}
		oneLine(t, p.Output(), "root")
	}
}

func TestDemoWithoutRoot(t *testing.T) {
	p := newSpace(t).startAs(t, 65534, "demo")
	<-p.Done()
	if p.ExitCode() != 1 {
		t.Errorf("exit code %d", p.ExitCode())
	}
	oneLine(t, p.Output(), "root")
}

func TestExistingSockets(t *testing.T) {
	r := newRig(t).start()
	t.Run("alive", func(t *testing.T) {
		for _, args := range [][]string{
			{"agent", "--link", r.link, "--control", r.agentCtl + "2"},
			{"agent", "--link", r.link + "2", "--control", r.agentCtl},
		} {
			p := r.guest.start(t, args...)
			<-p.Done()
			if p.ExitCode() != 1 {
				t.Errorf("%q: exit code %d", args, p.ExitCode())
			}
			oneLine(t, p.Output(), "stop it")
		}
		if _, err := r.list(); err != nil {
			t.Error("the first agent was harmed:", err)
		}
	})
	t.Run("dead", func(*testing.T) {
		r.agent.Kill() // leaves both sockets behind
		r.startAgent()
		r.eventually("the agent replaces them", func() error { _, err := r.list(); return err })
	})
}

// A peer that sends garbage, too much or too slowly is dropped; others are not
// affected.
func TestGarbage(t *testing.T) {
	r := newRig(t).start()
	go echo.Serve(r.guest.listen(t, "tcp4", "127.0.0.1:7000"))
	flow := echoThrough(t, r, "127.0.0.1:7000")
	dial := func(path string) net.Conn {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	for _, path := range []string{strings.TrimPrefix(r.link, "unix://"), r.agentCtl} {
		for name, send := range map[string]func(net.Conn){
			"garbage": func(c net.Conn) { _, _ = c.Write([]byte("\xff\xff\xff\xffgarbage\x00\x01\x02")) },
			"much":    func(c net.Conn) { _, _ = io.Copy(c, io.LimitReader(zeros{}, 64<<20)) },
			"slow":    func(c net.Conn) { _, _ = c.Write([]byte("G")) },
		} {
			c := dial(path)
			_ = c.SetWriteDeadline(time.Now().Add(time.Minute))
			send(c)
			if name == "slow" {
				continue // stays until its deadline
			}
			_ = c.SetReadDeadline(time.Now().Add(wait.Limit()))
			if _, err := io.Copy(io.Discard, c); err != nil && !isReset(err) {
				t.Errorf("%s at %s: the peer was not dropped: %v", name, path, err)
			}
		}
	}
	if err := roundTrip(flow, "unharmed"); err != nil {
		t.Error("a flow was harmed:", err)
	}
	r.eventually("the agent is small", func() error {
		if rss := used(t, r.agent).RSS; rss > 64<<20 {
			return fmt.Errorf("it holds %d MiB", rss>>20)
		}
		return nil
	})
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func isReset(err error) bool {
	return strings.Contains(err.Error(), syscall.ECONNRESET.Error()) || strings.Contains(err.Error(), syscall.EPIPE.Error())
}

func used(t *testing.T, p *process) usage.Usage {
	t.Helper()
	u, err := usage.Of(p.PID())
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestLs(t *testing.T) {
	r := newRig(t).start()
	r.guest.listen(t, "tcp4", "0.0.0.0:7000")
	r.wantState("tcp 0.0.0.0:7000", "active")
	var out string
	r.eventually("the table", func() (err error) { // who serves a port may be known later than the port
		var code int
		out, _, code = fairlead(t, "ls", "--control", r.agentCtl)
		if code != 0 || !regexp.MustCompile(`(?m)^7000/tcp +0\.0\.0\.0 +active +127\.0\.0\.1:7000 +\S+ \(\d+\) +\d+[sm]$`).MatchString(out) {
			err = fmt.Errorf("exit code %d, table:\n%s", code, out)
		}
		return err
	})
	for line := range strings.Lines(out) {
		if len(line) > 81 {
			t.Errorf("a line of %d columns: %q", len(line)-1, line)
		}
	}
	out, _, _ = fairlead(t, "ls", "-o", "json", "--control", r.agentCtl)
	l := decode[status.List](t, out)
	if len(l.Publications) != 1 || l.Publications[0].Outcomes[0].Sink != "hostlink" || l.Publications[0].DialTarget != "127.0.0.1:7000" {
		t.Errorf("json = %s", out)
	}
	out, _, _ = fairlead(t, "ls", "-o", "json", "--control", r.hostCtl)
	if l := decode[status.List](t, out); len(l.Publications) != 1 || l.Publications[0].State.String() != "active" {
		t.Errorf("host json = %s", out)
	}
}

// The log says at the start what runs, with which configuration, what it waits for, and where.
func TestLogAtStart(t *testing.T) {
	r := newRig(t)
	r.guest.listen(t, "tcp4", "127.0.0.1:8001")
	config := filepath.Join(r.dir, "agent.yaml")
	if err := os.WriteFile(config, []byte("holdDown: 1s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.agentFlags = []string{"--config", config}
	r.startAgent()
	r.agent.Prints("msg=starting version=", "config="+config, "sinks=hostlink link="+r.link, "msg=ready ports=1 waitingForHostAt="+r.link)
	if strings.Contains(r.agent.Output(), `=""`) {
		t.Errorf("an attribute is empty:\n%s", r.agent.Output())
	}
	r.agent.Kill()
	r.startHost()
	r.host.Prints("msg=starting version=", "config=none connect="+r.link, `msg="guest unreachable; retrying" guest=`+r.link)
}

func TestLogLevel(t *testing.T) {
	r := newRig(t).start()
	if out, _, _ := fairlead(t, "config", "loglevel", "set", "debug", "--control", r.agentCtl); out != "debug\n" {
		t.Errorf("set = %q", out)
	}
	if out, _, _ := fairlead(t, "config", "loglevel", "get", "--control", r.agentCtl); out != "debug\n" {
		t.Errorf("get = %q", out)
	}
	_, stderr, code := fairlead(t, "config", "loglevel", "set", "loud", "--control", r.agentCtl)
	if code != 2 {
		t.Errorf("exit code %d", code)
	}
	oneLine(t, stderr, "loud", "debug")
}

func TestLogLevelOfComponents(t *testing.T) {
	r := newRig(t).start()
	for _, control := range []string{r.agentCtl, r.hostCtl} {
		if out, stderr, _ := fairlead(t, "config", "loglevel", "set", "debug", "--component", "loglevel", "--component", "host,link", "--for", "1h", "--control", control); out != "debug\n" {
			t.Errorf("set = %q, %q", out, stderr)
		}
		out, _, _ := fairlead(t, "config", "loglevel", "get", "--control", control)
		if lines := strings.Split(out, "\n"); len(lines) != 5 || lines[0] != "info" || !strings.HasPrefix(lines[1], "debug of host for another ") {
			t.Errorf("get = %q", out)
		}
		out, _, _ = fairlead(t, "config", "loglevel", "get", "-o", "json", "--control", control)
		var state struct {
			loglevel.State
			SchemaVersion int `json:"schemaVersion"`
		}
		if err := json.Unmarshal([]byte(out), &state); err != nil || state.Level != "info" || len(state.Temporary) != 3 || state.SchemaVersion == 0 {
			t.Errorf("%v: %s", err, out)
		}
		if _, _, code := fairlead(t, "config", "loglevel", "set", "info", "--component", "host,link,loglevel", "--for", "1s", "--control", control); code != 0 {
			t.Errorf("exit code %d", code)
		}
		r.eventually("the levels end", func() error {
			if out, _, _ := fairlead(t, "config", "loglevel", "get", "--control", control); out != "info\n" {
				return errors.New(out)
			}
			return nil
		})
	}
	r.agent.Prints(`msg="log level set" components=loglevel,host,link level=debug lasts=1h0m0s`, `msg="log level restored" components=link level=info`)
}
