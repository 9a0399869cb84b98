// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// ordinary is a user without privileges.
const ordinary = 1000

// machine is a view of the file system that is this machine's, but with a /run,
// /var/lib, /etc and home directory of its own, so that default paths can be used.
type machine struct {
	*space
	dir, home string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{space: newSpace(t), dir: t.TempDir()}
	m.home = filepath.Join(m.dir, "home")
	for dir := m.dir; len(dir) > len(os.TempDir()); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"run", "lib", "etc", "home", "user"} {
		if err := os.Mkdir(filepath.Join(m.dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"home", "user"} {
		if err := errors.Join(os.Chown(filepath.Join(m.dir, d), ordinary, ordinary), os.Chmod(filepath.Join(m.dir, d), 0o700)); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// shareRun makes m use the /run of o, as programs on one kernel do.
func (m *machine) shareRun(t *testing.T, o *machine) {
	t.Helper()
	if err := os.Remove(filepath.Join(m.dir, "run")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(o.dir, "run"), filepath.Join(m.dir, "run")); err != nil {
		t.Fatal(err)
	}
}

// command returns fairlead as uid sees this machine. An ordinary user has a home and a
// runtime directory.
func (m *machine) command(uid int, args ...string) *exec.Cmd {
	return m.program(uid, append([]string{binary}, args...)...)
}

// program is command for any program; fairlead is in its PATH. A file "systemctl" in the
// machine's directory is in the place of that program, a directory "bin" in that of /usr/local/bin.
func (m *machine) program(uid int, args ...string) *exec.Cmd {
	script := `mount --bind "$0/run" /run; mount --bind "$0/lib" /var/lib; mount --bind "$0/etc" /etc; ` +
		`if [ -e "$0/systemctl" ]; then mount --bind "$0/systemctl" /usr/bin/systemctl; fi; ` +
		`if [ -e "$0/bin" ]; then mount --bind "$0/bin" /usr/local/bin; fi; exec `
	if uid != 0 {
		script += fmt.Sprintf("setpriv --reuid %d --regid %d --clear-groups ", uid, uid)
	}
	script = "set -e; " + script + `"$@"`
	cmd := exec.Command("unshare", append([]string{"--mount", "--propagation", "private", "sh", "-c", script, m.dir}, args...)...)
	path := filepath.Dir(binary) + ":" + os.Getenv("PATH")
	if _, err := os.Stat(filepath.Join(m.dir, "bin")); err == nil {
		path = "/usr/local/bin:" + os.Getenv("PATH") // fairlead is where it was installed, or nowhere
	}
	cmd.Env = []string{"PATH=" + path, "HOME=" + m.home}
	if uid != 0 {
		cmd.Env = append(cmd.Env, "XDG_RUNTIME_DIR="+filepath.Join(m.dir, "user"))
	}
	return cmd
}

func (m *machine) run(t *testing.T, uid int, args ...string) *process {
	t.Helper()
	return m.startCmd(t, args[0], m.command(uid, args...))
}

// ask runs a command to its end.
func (m *machine) ask(t *testing.T, uid int, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit())
	defer cancel()
	c := m.command(uid, args...)
	cmd := exec.CommandContext(ctx, c.Path, c.Args[1:]...)
	var o, e bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = c.Env, &o, &e
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return o.String(), e.String(), cmd.ProcessState.ExitCode()
}

// active waits until a port of the guest is open on the host.
func (m *machine) active(t *testing.T, uid int, port uint16, process *process) {
	t.Helper()
	wait.Until(t, fmt.Sprintf("%d/tcp is open on the host", port), func() error {
		if process.Ended() {
			t.Fatalf("it ended: %s", process.Output())
		}
		out, stderr, _ := m.ask(t, uid, "ls", "-o", "json")
		var l status.List
		if err := json.Unmarshal([]byte(out), &l); err != nil {
			return errors.New(stderr)
		}
		for _, p := range l.Publications {
			if p.Port == port && p.State.String() == "active" {
				return nil
			}
		}
		return fmt.Errorf("not in %s", out)
	})
}

// The link of the README, with the defaults of both sides, which share nothing but /run.
func TestUnixLinkWithDefaults(t *testing.T) {
	guest, host := newMachine(t), newMachine(t)
	host.shareRun(t, guest)
	guest.listen(t, "tcp4", "0.0.0.0:8001")
	guest.run(t, 0, "agent")
	p := host.run(t, 0, "host")
	host.active(t, 0, 8001, p)
	if _, err := os.Stat(filepath.Join(guest.dir, "lib", "fairlead", "token")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a token was made that nobody needs: %v", err)
	}
}

// The host is told to use a token that does not exist yet.
func TestHostWaitsForItsToken(t *testing.T) {
	guest, host := newMachine(t), newMachine(t)
	host.shareRun(t, guest)
	token := filepath.Join(t.TempDir(), "token")
	p := host.run(t, 0, "host", "--link-token", token)
	p.Prints("fairlead host pair", token)
	guest.listen(t, "tcp4", "0.0.0.0:8001")
	guest.run(t, 0, "agent", "--link-token", token)
	host.active(t, 0, 8001, p)
}

// An ordinary user's host has its files in the user's directories, and reaches an agent
// that allows this user.
func TestHostOfAnOrdinaryUser(t *testing.T) {
	guest, host := newMachine(t), newMachine(t)
	host.shareRun(t, guest)
	guest.listen(t, "tcp4", "0.0.0.0:8001")
	agent := guest.run(t, 0, "agent", "--allow-uids", fmt.Sprint(ordinary))
	p := host.run(t, ordinary, "host")
	host.active(t, ordinary, 8001, p)
	if _, err := os.Stat(filepath.Join(host.dir, "user", "fairlead", "host.sock")); err != nil {
		t.Error(err)
	}
	agent.Prints("uid 1000")
	_, stderr, code := guest.ask(t, ordinary, "ls")
	if code != 1 || !strings.Contains(stderr, "run as root") {
		t.Errorf("an ordinary user asks the agent: %d, %s", code, stderr)
	}
}

func TestUserThatIsNotAllowed(t *testing.T) {
	guest, host := newMachine(t), newMachine(t)
	host.shareRun(t, guest)
	guest.run(t, 0, "agent", "--allow-uids", fmt.Sprint(ordinary+1)).Prints("ready")
	host.run(t, ordinary, "host").Prints("refused by the peer (uid)", "uid 1000")
}

// A token is kept in the user's state directory, and found there.
func TestPairAsAnOrdinaryUser(t *testing.T) {
	m := newMachine(t)
	given := filepath.Join(m.dir, "home", "given")
	if err := errors.Join(os.WriteFile(given, []byte(strings.Repeat("0123456789abcdef", 4)), 0o600), os.Chown(given, ordinary, ordinary)); err != nil {
		t.Fatal(err)
	}
	out, stderr, code := m.ask(t, ordinary, "host", "pair", "--from", given)
	kept := filepath.Join(m.home, ".local", "state", "fairlead", "token")
	if code != 0 || !strings.Contains(out, kept) {
		t.Errorf("exit code %d, %s%s", code, out, stderr)
	}
	if fi, err := os.Stat(kept); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
}

// A token is kept where the host with its configuration looks for it, and the next step is
// that of this host.
func TestPairGoesByTheHostsConfiguration(t *testing.T) {
	m := newMachine(t)
	given, kept := filepath.Join(m.home, "given"), filepath.Join(m.home, "mine")
	file := filepath.Join(m.home, ".config", "fairlead", "host.yaml")
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(given, []byte(strings.Repeat("0123456789abcdef", 4)), 0o600), os.Chown(given, ordinary, ordinary)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		yaml, args string
		code       int
		want       []string
	}{
		{"linkToken: " + kept, "--from " + given, 0, []string{"Token stored in " + kept + ".", "Next: fairlead host install -- --connect vsock://CID:1023\n"}},
		{"linkToken: " + kept, "--guest dev --from " + given, 0, []string{"Token stored in " + kept + "."}},
		{"linkToken: " + kept, "--from " + given + " --link-token " + given + ".copy", 0, []string{"Token stored in " + given + ".copy."}},
		{"{listen: 'wss://:8443', cert: /c, key: /k, guest: [web1]}", "--guest web1 --from " + given, 0, []string{"fairlead/web1.token.", "web1 dials this host", "Next: fairlead host install\n"}},
		{"{listen: 'wss://:8443', cert: /c, key: /k, guest: [web1]}", "--guest dev --from " + given, 0, []string{"fairlead/dev.token.", "--connect dev=vsock://CID:1023\n", "A guest that dials out"}},
		{"linkToken: [", "--from " + given, 2, []string{file}},
	} {
		if err := os.WriteFile(file, []byte(c.yaml+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		out, stderr, code := m.ask(t, ordinary, append([]string{"host", "pair"}, strings.Fields(c.args)...)...)
		for _, want := range c.want {
			if code != c.code || !strings.Contains(out+stderr, want) {
				t.Errorf("%s with %q: exit code %d, want %d and %q in %s%s", c.args, c.yaml, code, c.code, want, out, stderr)
			}
		}
	}
}

// Doctor as an ordinary user, who may not ask the agent, blames neither the agent nor
// its files.
func TestDoctorWithoutPrivilege(t *testing.T) {
	m := newMachine(t)
	m.run(t, 0, "agent").Prints("ready")
	out, stderr, code := m.ask(t, ordinary, "doctor")
	if code != 0 || !strings.Contains(out, "run `fairlead doctor` as root") {
		t.Errorf("exit code %d: %s%s", code, out, stderr)
	}
	for _, wrong := range []string{"start `fairlead agent`", "start the agent once", "FAIL"} {
		if strings.Contains(out, wrong) {
			t.Errorf("%q in\n%s", wrong, out)
		}
	}
}

// Doctor on a host diagnoses the host, with the reason for which a guest is missing.
func TestDoctorOfAHost(t *testing.T) {
	guest, host := newMachine(t), newMachine(t)
	host.shareRun(t, guest)
	guest.run(t, 0, "agent").Prints("ready")
	p := host.run(t, ordinary, "host")
	p.Prints("guest unreachable")
	out, stderr, code := host.ask(t, ordinary, "doctor")
	for _, w := range []string{"ok    host running", "FAIL  guest link", "--allow-uids"} {
		if code != 1 || !strings.Contains(out, w) {
			t.Errorf("exit code %d, no %q in %s%s", code, w, out, stderr)
		}
	}
	p.Stop(syscall.SIGTERM)
	host.run(t, 0, "host")
	wait.Until(t, "doctor is content", func() error {
		if out, _, code := host.ask(t, 0, "doctor", "--host"); code != 0 {
			return errors.New(out)
		}
		return nil
	})
}

func TestInstallNeedsTheToken(t *testing.T) {
	_, stderr, code := newMachine(t).ask(t, ordinary, "host", "install", "--", "--connect", "vsock://3:1023")
	if code != 1 {
		t.Errorf("exit code %d", code)
	}
	oneLine(t, stderr, "fairlead host pair", ".local/state/fairlead/token")
	if n := strings.Count(stderr, "fairlead/token"); n != 1 {
		t.Errorf("the path is there %d times: %s", n, stderr)
	}
}

// Whatever `fairlead host` would not start with is refused before anything is written.
func TestInstallRefusesWhatDoesNotStart(t *testing.T) {
	m := newMachine(t)
	file := filepath.Join(m.dir, "bad.yaml")
	if err := os.WriteFile(file, []byte("bind: nowhere\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		flags, want string
		code        int
	}{
		{"--metrics-addr 192.0.2.1:9464", "choose another --metrics-addr", 1},
		{"--log-file /proc/no/log", "log file", 1},
		{"--config " + file, "bad.yaml:1:", 2},
		{"--rules-file /nonexistent/rules.yaml", "/nonexistent/rules.yaml", 2},
		{"--config bad.yaml", "absolute path", 2},
	} {
		_, stderr, code := m.ask(t, ordinary, append([]string{"host", "install", "--"}, strings.Fields(c.flags)...)...)
		if code != c.code {
			t.Errorf("%s: exit code %d", c.flags, code)
		}
		oneLine(t, stderr, c.want)
		if _, err := os.Lstat(filepath.Join(m.home, ".config/systemd")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: a unit was written: %v", c.flags, err)
		}
	}
}
