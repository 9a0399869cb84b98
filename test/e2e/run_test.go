// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/test/kit/wait"
)

// The agent with its few capabilities runs for containers what its configuration allows, as
// another user, and nothing else.
func TestRunOnRequest(t *testing.T) {
	const id = "5f1e3c0a9b7d2c6e8f5a1b3d7c9e0f2a4b6c8d0e1f3a5b7c9d1e3f5a7b9c0d2f"
	docker := dockerWith(t, fmt.Sprintf(`{"Id":%q,"Name":"/web","Names":["/web"],"State":{"Status":"running","Running":true},`+
		`"Config":{},"HostConfig":{},"NetworkSettings":{"Networks":{},"Ports":{}}}`, id))
	dir := t.TempDir()
	socket := filepath.Join(dir, "run", "publish.sock")
	config := filepath.Join(dir, "agent.yaml")
	entries := ""
	for _, e := range []struct{ name, path, args string }{
		{"cat", "/bin/cat", ""}, {"id", "/usr/bin/id", `"-u"`}, {"ls", "/bin/ls", `"/nowhere[0-9]"`}, {"sleep", "/bin/sleep", `"[0-9]+"`},
	} {
		b, err := os.ReadFile(e.path)
		if err != nil {
			t.Fatal(err)
		}
		entries += fmt.Sprintf("  - {name: %s, match: {name: web}, path: %s, sha256: %x, args: [%s], env: [LC_ALL], user: nobody}\n", e.name, e.path, sha256.Sum256(b), e.args)
	}
	if err := os.WriteFile(config, fmt.Appendf(nil, "docker: {hosts: %s}\npublish: {socket: %s}\nrun:\n  allow:\n%s", docker, socket, entries), 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, "--config", config, "--source", "socket,docker")
	r.start()
	wait.Until(t, "the socket", func() error { _, err := os.Stat(socket); return err })
	group := cgroupOf(t, id)
	run := func(args ...string) *exec.Cmd {
		return exec.Command("/bin/sh", append([]string{"-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, group.Name(), binary, "run", "--socket", socket}, args...)...)
	}
	// The engine's container may be known a moment later.
	wait.Until(t, "the container is known", func() error {
		if out, err := run("id", "--", "-u").CombinedOutput(); err != nil || string(out) != "65534\n" {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	for _, c := range []struct {
		args   []string
		in     string
		status int
		want   string
	}{
		{[]string{"cat"}, "hello\n", 0, "hello\n"},
		{[]string{"-e", "LC_ALL=C", "ls", "--", "/nowhere1"}, "", 2, "/bin/ls: cannot access '/nowhere1': No such file or directory\n"},
		{[]string{"ls", "--", "/nowhere"}, "", 125, "argument 1, \"/nowhere\", does not match"},
		{[]string{"ls", "/nowhere1"}, "", 2, "the program's arguments after --"},
		{[]string{"-e", "HOME=/", "cat"}, "", 125, `variable "HOME"`},
		{[]string{"rm"}, "", 125, `policy: no entry of run.allow lets container "web" run "rm"`},
	} {
		cmd := run(c.args...)
		cmd.Stdin = strings.NewReader(c.in)
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != c.status || !bytes.Contains(out, []byte(c.want)) {
			t.Errorf("%q: exit %d, want %d (%v)\n%s, want %s", c.args, code, c.status, err, out, c.want)
		}
	}
	client := run("sleep", "--", "98765")
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the job runs", func() error { return sleeps(true) })
	_ = client.Process.Kill()
	_ = client.Wait()
	wait.Until(t, "the job is killed", func() error { return sleeps(false) })
}

// sleeps returns nil if the job runs, or does not.
func sleeps(want bool) error {
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, l := range lines {
		if b, err := os.ReadFile(l); err == nil && string(b) == "/bin/sleep\x0098765\x00" {
			if want {
				return nil
			}
			return errors.New("it does")
		}
	}
	if want {
		return errors.New("it does not")
	}
	return nil
}
