// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// hostPrograms writes a host's configuration and a program that a test may change.
func hostPrograms(t *testing.T, dir string) (config, program string) {
	t.Helper()
	program = filepath.Join(dir, "program")
	shell, err := os.ReadFile("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, shell, 0o755); err != nil {
		t.Fatal(err)
	}
	text := "run:\n  jobs: 2\n  asRoot: true\n  allow:\n"
	for _, e := range []struct{ name, guests, path, args string }{
		{"sh", "unix://*", program, `"-c", ".*"`}, {"cat", "unix://*", "/bin/cat", ""}, {"sleep", "unix://*", "/bin/sleep", `"[0-9]+"`},
		{"others", "another", "/bin/cat", ""}, {"unasked", "unix://*", "/bin/cat", ""},
	} {
		b, err := os.ReadFile(e.path)
		if err != nil {
			t.Fatal(err)
		}
		text += fmt.Sprintf("  - {name: %s, guests: [%q], path: %s, sha256: %x, args: [%s]}\n", e.name, e.guests, e.path, sha256.Sum256(b), e.args)
	}
	config = filepath.Join(dir, "host.yaml")
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return config, program
}

// A guest has programs of its host run that both configurations allow, and nothing is left of
// them when the client, the agent or the host peer is killed.
func TestRunOnTheHost(t *testing.T) {
	dir := t.TempDir()
	socket, config := filepath.Join(dir, "run", "publish.sock"), filepath.Join(dir, "agent.yaml")
	asks := ""
	for _, name := range []string{"sh", "cat", "sleep", "others", "nothing"} {
		asks += fmt.Sprintf("  - {name: %s, users: [root]}\n", name)
	}
	// This user asks more often than containers may by default.
	if err := os.WriteFile(config, fmt.Appendf(nil, "publish: {socket: %s, requests: 1000}\nrun:\n  host:\n%s", socket, asks), 0o600); err != nil {
		t.Fatal(err)
	}
	hostConfig, program := hostPrograms(t, dir)
	r := newRig(t, "--config", config, "--source", "socket")
	r.start()
	run := func(args ...string) *exec.Cmd {
		return exec.Command(binary, append([]string{"run", "--host", "--socket", socket}, args...)...)
	}
	check := func(in string, status int, want string, args ...string) {
		t.Helper()
		cmd := run(args...)
		cmd.Stdin = strings.NewReader(in)
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != status || !bytes.Contains(out, []byte(want)) {
			t.Errorf("%q: exit %d, want %d (%v)\n%s, want %s", args, code, status, err, out, want)
		}
	}
	wait.Until(t, "the socket", func() error { _, err := os.Stat(socket); return err })
	// To the agent a host without run.allow is the same as one that is too old.
	wait.Until(t, "the host is connected and runs no programs", func() error {
		cmd := run("cat")
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != 125 || !bytes.Contains(out, []byte("runs no programs")) {
			return fmt.Errorf("exit %d (%w): %s", code, err, out)
		}
		return nil
	})
	r.host.Kill()
	r.hostFlags = []string{"--config", hostConfig}
	connect := func() {
		t.Helper()
		wait.Until(t, "the host runs programs", func() error {
			out, err := run("sh", "--", "-c", "exit 0").CombinedOutput()
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			return err
		})
	}
	r.startHost()
	connect()
	check("hello\n", 0, "hello\n", "cat")
	for _, want := range []string{"out\n", "err\n"} { // two streams, in any order
		check("", 7, want, "sh", "--", "-c", "echo out; echo err >&2; exit 7")
	}
	check("", 137, "", "sh", "--", "-c", "kill -9 $$")
	check("", 125, `no entry of run.host lets user 0 ask the host for "unasked"`, "unasked")
	check("", 125, `policy: no entry of the host's run.allow lets guest`, "others")
	check("", 125, `policy: no entry of the host's run.allow lets guest`, "nothing")
	check("", 125, "argument 1, \"1m\", does not match", "sleep", "--", "1m")
	changed(t, program)
	check("", 125, "SHA-256", "sh", "--", "-c", "exit 0")
	changed(t, program) // back
	seconds := ownSeconds()
	for what, kill := range map[string]func(client *exec.Cmd){
		"client": func(client *exec.Cmd) { _ = client.Process.Kill() },
		"agent":  func(*exec.Cmd) { r.agent.Kill() },
		"host":   func(*exec.Cmd) { r.host.Kill() },
	} {
		client, said := run("sleep", "--", seconds), new(bytes.Buffer)
		client.Stderr = said
		if err := client.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- client.Wait() }()
		wait.Until(t, "the program runs", func() error {
			select {
			case err := <-ended:
				t.Fatalf("the client ended: %v, %s", err, said)
			default:
			}
			return sleeps(seconds, true)
		})
		kill(client)
		_ = wait.For(t, "the end of the client", ended)
		if code := client.ProcessState.ExitCode(); what != "client" && code != 125 {
			t.Errorf("%s killed: exit %d, want 125", what, code)
		}
		wait.Until(t, "the program is killed with the "+what, func() error { return sleeps(seconds, false) })
		switch what {
		case "agent":
			r.startAgent()
		case "host":
			r.startHost()
		}
		connect()
	}
}

// changed flips a bit of a program's file.
func changed(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-1] ^= 1
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
}
