// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/test/kit/program"
)

// runs checks that containers of one engine have programs of the guest run: input, output, exit
// status, denials, and that nothing is left when a container is killed.
func runs(t *testing.T, flags []string, run func(args ...string) (string, error)) {
	dir := t.TempDir()
	service, err := program.RunPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	p := startPeers(t, flags...)
	socket, config := filepath.Join(dir, "run", "run.sock"), filepath.Join(dir, "run.yaml")
	text := fmt.Sprintf("socket: %s\ncontrol: %s\nallow:\n", socket, p.control)
	for _, e := range []struct{ name, path, args string }{
		{"cat", "/bin/cat", ""}, {"exit", "/bin/sh", `"-c", "exit [0-9]"`}, {"sleep", "/bin/sleep", `"[0-9]+"`}, {"network", "/bin/readlink", `"/proc/self/ns/net"`},
	} {
		b, err := os.ReadFile(e.path)
		if err != nil {
			t.Fatal(err)
		}
		text += fmt.Sprintf("  - {name: %s, match: {name: web}, path: %s, sha256: %x, args: [%s], user: nobody}\n", e.name, e.path, sha256.Sum256(b), e.args)
	}
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	program.Start(t, program.Command{Cmd: exec.Command(service, "serve", "--config", config), Name: "fairlead-run", End: syscall.SIGTERM})
	eventually(t, func() error { _, err := os.Stat(socket); return err })
	in := func(name string, command ...string) []string {
		return append([]string{"--name", name, "-v", socket + ":/run/fairlead-run/run.sock:ro", "-v", service + ":/fairlead-run:ro", "bb"}, command...)
	}
	if _, err := run(append([]string{"run", "-d"}, in("web", "sleep", "1000")...)...); err != nil {
		t.Fatal(err)
	}
	web := func(script string) error {
		out, err := run("exec", "web", "sh", "-c", script)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	// The engine reports a container that has just started a moment later.
	eventually(t, func() error { return web(`[ "$(echo hello | /fairlead-run cat)" = hello ]`) })
	network, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, script := range []string{
		fmt.Sprintf(`[ "$(/fairlead-run network -- /proc/self/ns/net)" = %q ]`, network),
		`/fairlead-run exit -- -c "exit 0"`,
		`/fairlead-run exit -- -c "exit 7"; [ $? = 7 ]`,
		`/fairlead-run exit -- -c "exit 7; id"; [ $? = 125 ]`,
		`/fairlead-run cat -- /etc/shadow; [ $? = 125 ]`,
		`head -c 3000000 /dev/urandom >/tmp/in && /fairlead-run cat </tmp/in >/tmp/out && cmp /tmp/in /tmp/out`,
	} {
		if err := web(script); err != nil {
			t.Errorf("%s: %v", script, err)
		}
	}
	eventually(t, func() error {
		_, err := run(append([]string{"run", "--rm"}, in("db", "/fairlead-run", "cat")...)...)
		if err == nil || !strings.Contains(err.Error(), `policy: no entry matches container "db"`) {
			return fmt.Errorf("the other container: %v", err)
		}
		return nil
	})
	seconds := fmt.Sprint(1e9 + rand.Int64N(1e9)) // no other program has this argument
	if _, err := run("exec", "-d", "web", "/fairlead-run", "sleep", "--", seconds); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { return sleeping(seconds, true) })
	if _, err := run("kill", "web"); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { return sleeping(seconds, false) })
}

// sleeping returns nil if the program that sleeps so long runs, or does not.
func sleeping(seconds string, want bool) error {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && string(b) == "/bin/sleep\x00"+seconds+"\x00" {
			if want {
				return nil
			}
			return errors.New("the program runs")
		}
	}
	if want {
		return errors.New("the program does not run")
	}
	return nil
}

func TestRunFromDocker(t *testing.T) {
	dockerd(t)
	dockerImage(t)
	runs(t, []string{"--source", "socket,docker", "--docker-host", "unix://" + dockerSocket}, func(args ...string) (string, error) { return try("docker", args...) })
}

func TestRunFromNerdctl(t *testing.T) {
	startContainerd(t)
	containerdImage(t)
	runs(t, []string{"--source", "socket,containerd", "--containerd-socket", containerdSocket}, func(args ...string) (string, error) { return nerdctl("default", args...) })
}
