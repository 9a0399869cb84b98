// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// runs checks that containers of one engine have programs of the guest and of the host run:
// input, output, exit status, denials, and that nothing is left when a container is killed.
func runs(t *testing.T, flags []string, run func(args ...string) (string, error)) {
	dir := t.TempDir()
	socket, config := filepath.Join(dir, "run", "publish.sock"), filepath.Join(dir, "agent.yaml")
	text, asks := fmt.Sprintf("publish: {socket: %s}\nrun:\n  allow:\n", socket), "  host:\n"
	hostText := "run:\n  asRoot: true\n  allow:\n"
	for _, e := range []struct{ name, path, args string }{
		{"cat", "/bin/cat", ""}, {"exit", "/bin/sh", `"-c", "exit [0-9]"`}, {"sleep", "/bin/sleep", `"[0-9]+"`}, {"network", "/bin/readlink", `"/proc/self/ns/net"`},
	} {
		b, err := os.ReadFile(e.path)
		if err != nil {
			t.Fatal(err)
		}
		is := fmt.Sprintf("path: %s, sha256: %x, args: [%s]", e.path, sha256.Sum256(b), e.args)
		text += fmt.Sprintf("  - {name: %s, match: {name: web}, %s, user: nobody}\n", e.name, is)
		asks += fmt.Sprintf("  - {name: %s, match: {name: web}}\n", e.name)
		hostText += fmt.Sprintf("  - {name: %s, guests: [\"*\"], %s}\n", e.name, is)
	}
	hostConfig := filepath.Join(dir, "host.yaml")
	for path, text := range map[string]string{config: text + asks, hostConfig: hostText} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p := startPeersWith(t, []string{"--config", hostConfig}, append(flags, "--config", config)...)
	eventually(t, func() error { _, err := os.Stat(socket); return err })
	in := func(name string, command ...string) []string {
		return append([]string{"--name", name, "-v", socket + ":/run/fairlead/publish.sock:ro", "-v", binary() + ":/fairlead:ro", "bb"}, command...)
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
	eventually(t, func() error { return web(`[ "$(echo hello | /fairlead run cat)" = hello ]`) })
	eventually(t, func() error { return web(`[ "$(echo hello | /fairlead run --host cat)" = hello ]`) })
	for where, pid := range map[string]int{"": os.Getpid(), "--host": p.host.PID()} {
		network, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err != nil {
			t.Fatal(err)
		}
		if err := web(fmt.Sprintf(`[ "$(/fairlead run %s network -- /proc/self/ns/net)" = %q ]`, where, network)); err != nil {
			t.Errorf("the program of %q runs elsewhere: %v", where, err)
		}
	}
	for _, script := range []string{
		`/fairlead run --host exit -- -c "exit 7"; [ $? = 7 ]`,
		`/fairlead run --host exit -- -c "exit 7; id"; [ $? = 125 ]`,
		`head -c 3000000 /dev/urandom >/tmp/in && /fairlead run --host cat </tmp/in >/tmp/out && cmp /tmp/in /tmp/out`,
		`/fairlead run exit -- -c "exit 0"`,
		`/fairlead run exit -- -c "exit 7"; [ $? = 7 ]`,
		`/fairlead run exit -- -c "exit 7; id"; [ $? = 125 ]`,
		`/fairlead run cat -- /etc/shadow; [ $? = 125 ]`,
		`head -c 3000000 /dev/urandom >/tmp/in && /fairlead run cat </tmp/in >/tmp/out && cmp /tmp/in /tmp/out`,
	} {
		if err := web(script); err != nil {
			t.Errorf("%s: %v", script, err)
		}
	}
	eventually(t, func() error {
		_, err := run(append([]string{"run", "--rm"}, in("db", "/fairlead", "run", "cat")...)...)
		if err == nil || !strings.Contains(err.Error(), `policy: no entry of publish.allow, run.allow or run.host matches container "db"`) {
			return fmt.Errorf("the other container: %v", err)
		}
		return nil
	})
	first := 1e9 + rand.Int64N(1e9) // no other program has this argument, or the next
	for i, of := range [][]string{nil, {"--host"}} {
		seconds := fmt.Sprint(first + int64(i))
		command := append(append([]string{"exec", "-d", "web", "/fairlead", "run"}, of...), "sleep", "--", seconds)
		if _, err := run(command...); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error { return sleeping(seconds, true) })
	}
	if _, err := run("kill", "web"); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		eventually(t, func() error { return sleeping(fmt.Sprint(first+int64(i)), false) })
	}
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
