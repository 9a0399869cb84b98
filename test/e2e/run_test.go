// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/program"
)

// fairlead-run runs for containers what its configuration allows, as another user, and nothing
// else. The agent, without further rights, tells it whose a process is.
func TestRunOnRequest(t *testing.T) {
	const id = "5f1e3c0a9b7d2c6e8f5a1b3d7c9e0f2a4b6c8d0e1f3a5b7c9d1e3f5a7b9c0d2f"
	docker := enginetest.Docker(t, fmt.Sprintf(`{"Id":%q,"Name":"/web","Names":["/web"],"State":{"Status":"running","Running":true},`+
		`"Config":{},"HostConfig":{},"NetworkSettings":{"Networks":{},"Ports":{}}}`, id))
	dir := t.TempDir()
	service, err := program.RunPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	socket, config, agentConfig := filepath.Join(dir, "run", "run.sock"), filepath.Join(dir, "run.yaml"), filepath.Join(dir, "agent.yaml")
	if err := os.WriteFile(agentConfig, fmt.Appendf(nil, "docker: {hosts: %s}\n", docker), 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, "--config", agentConfig, "--source", "socket,docker")
	r.start()
	text := fmt.Sprintf("socket: %s\ncontrol: %s\nclientRequests: 100\nallow:\n", socket, r.agentCtl)
	for _, e := range []struct{ name, path, args, more string }{
		{"cat", "/bin/cat", "", "users: [nobody]"}, {"id", "/usr/bin/id", `"-u"`, "users: [nobody]"}, {"ls", "/bin/ls", `"/nowhere[0-9]"`, "tty: false"},
		{"sleep", "/bin/sleep", `"[0-9]+"`, "tty: false"}, {"brief", "/bin/sleep", `"[0-9]+"`, "time: 1s"}, {"stty", "/bin/stty", `"size"`, "tty: true"}, {"head", "/usr/bin/head", `"-n2"`, "tty: true"},
	} {
		b, err := os.ReadFile(e.path)
		if err != nil {
			t.Fatal(err)
		}
		text += fmt.Sprintf("  - {name: %s, %s, match: {name: web}, path: %s, sha256: %x, args: [%s], env: [LC_ALL], user: nobody}\n", e.name, e.more, e.path, sha256.Sum256(b), e.args)
	}
	configure := func(text string) {
		t.Helper()
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	configure(text)
	start := func() *program.Process {
		t.Helper()
		p := program.Start(t, program.Command{Cmd: exec.Command(service, "serve", "--config", config), Name: "fairlead-run", End: syscall.SIGTERM})
		wait.Until(t, "the socket", func() error { _, err := os.Stat(socket); return err })
		return p
	}
	server := start()
	group := cgroupOf(t, id)
	run := func(args ...string) *exec.Cmd {
		return exec.Command("/bin/sh", append([]string{"-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, group.Name(), service, "--socket", socket}, args...)...)
	}
	// The engine's container may be known a moment later.
	known := func() {
		t.Helper()
		wait.Until(t, "the container is known", func() error {
			if out, err := run("id", "--", "-u").CombinedOutput(); err != nil || string(out) != "65534\n" {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
	known()
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
		{[]string{"-t", "stty", "--", "size"}, "", 125, "--tty: the input is no terminal"},
		{[]string{"rm"}, "", 125, `policy: no entry lets container "web" run "rm"`},
		{[]string{"brief", "--", "1000"}, "", 137, "brief: killed for its limit of time"},
	} {
		cmd := run(c.args...)
		cmd.Stdin = strings.NewReader(c.in)
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != c.status || !bytes.Contains(out, []byte(c.want)) {
			t.Errorf("%q: exit %d, want %d (%v)\n%s, want %s", c.args, code, c.status, err, out, c.want)
		}
	}
	runAsGuest(t, service, socket)
	runAtTerminal(t, run)
	seconds := ownSeconds()
	sleep := func() *exec.Cmd {
		client := run("sleep", "--", seconds)
		if err := client.Start(); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, "the job runs", func() error { return sleeps(seconds, true) })
		return client
	}
	gone := func(client *exec.Cmd) {
		t.Helper()
		_ = client.Wait()
		if code := client.ProcessState.ExitCode(); code != 125 {
			t.Errorf("exit %d, want 125", code)
		}
		wait.Until(t, "the job is killed", func() error { return sleeps(seconds, false) })
	}
	client := sleep()
	_ = client.Process.Kill()
	_ = client.Wait()
	wait.Until(t, "the job is killed", func() error { return sleeps(seconds, false) })

	client = sleep()
	server.Kill()
	gone(client)

	server = start()
	known()
	client = sleep()
	for pid, want := range map[int]string{server.PID(): "0000000000080000", helperOf(t, server.PID()): "00000000000000e0"} {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil || !bytes.Contains(status, []byte("CapPrm:\t"+want+"\nCapEff:\t"+want+"\n")) || !bytes.Contains(status, []byte("NoNewPrivs:\t1\n")) {
			t.Errorf("want the capabilities %s and no more (%v):\n%s", want, err, status)
		}
	}
	if err := syscall.Kill(helperOf(t, server.PID()), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone(client)
	wait.Until(t, "the service ends with its helper", func() error {
		if !strings.Contains(server.Output(), "the helper has ended") {
			return errors.New("it runs")
		}
		return nil
	})

	server = start()
	known()
	// A right that is taken away ends what it allowed, and a restart of the agent does not.
	client = sleep()
	r.agent.Kill()
	wait.Until(t, "the agent cannot be asked", func() error {
		if out, err := run("cat").CombinedOutput(); err == nil || !bytes.Contains(out, []byte("agent: it cannot be asked")) || bytes.Contains(out, []byte(r.agentCtl)) {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	r.startAgent()
	known()
	if err := sleeps(seconds, true); err != nil {
		t.Errorf("the job, after a restart of the agent: %v", err)
	}
	configure(strings.ReplaceAll(text, "name: web", "name: db"))
	gone(client)
	if out, err := run("cat").CombinedOutput(); err == nil || !bytes.Contains(out, []byte(`policy: no entry matches container "web"`)) {
		t.Errorf("without a right: %v, %s", err, out)
	}
}

// runAsGuest has users of the guest, outside of containers, ask for programs.
func runAsGuest(t *testing.T, service, socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "fairlead-guest-") // which all may enter
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	client := filepath.Join(dir, "fairlead-run")
	if out, err := exec.Command("cp", service, client).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for d := filepath.Dir(socket); d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		uid    uint32
		flags  uintptr
		args   []string
		status int
		want   string
	}{
		{65534, 0, []string{"id", "--", "-u"}, 0, "65534\n"},
		{65534, 0, []string{"cat"}, 0, ""},
		{65534, 0, []string{"ls", "--", "/nowhere1"}, 125, `policy: no entry lets user 65534 run "ls"`},
		{65533, 0, []string{"cat"}, 125, "policy: no entry matches user 65533"},
		{0, 0, []string{"cat"}, 125, "policy: no entry matches user 0"},
		// What an engine that the agent does not know runs is no process of the guest.
		{65534, syscall.CLONE_NEWNS, []string{"cat"}, 125, "container: "},
		{65534, syscall.CLONE_NEWPID, []string{"cat"}, 125, "container: "},
	} {
		cmd := exec.Command(client, append([]string{"--socket", socket}, c.args...)...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: c.uid, Gid: c.uid}, Cloneflags: c.flags}
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != c.status || !bytes.Contains(out, []byte(c.want)) {
			t.Errorf("user %d, %q: exit %d, want %d (%v)\n%s, want %s", c.uid, c.args, code, c.status, err, out, c.want)
		}
	}
}

// runAtTerminal runs programs at a terminal, which is as before afterwards, whatever ends the client.
func runAtTerminal(t *testing.T, run func(args ...string) *exec.Cmd) {
	t.Helper()
	master, slave := terminal(t)
	before, err := term.GetState(int(slave.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	shown := bufio.NewReader(master)
	sees := func(want string) {
		t.Helper()
		if line, err := shown.ReadString('\n'); err != nil || !strings.Contains(line, want) {
			t.Errorf("the terminal shows %q, %v; want %s", line, err, want)
		}
	}
	for _, c := range []struct {
		name   string
		args   []string
		status int
		end    func(p *os.Process) error // after it has echoed "x"
		want   string
	}{
		{"size", []string{"-t", "stty", "--", "size"}, 0, nil, "33 99"},
		{"refused", []string{"-t", "ls", "--", "/nowhere1"}, 125, nil, "its entry needs tty: true"},
		{"end of input", []string{"-t", "head", "--", "-n2"}, 0, func(*os.Process) error { _, err := master.WriteString("\x04"); return err }, ""},
		{"interrupt", []string{"-t", "head", "--", "-n2"}, 130, func(*os.Process) error { _, err := master.WriteString("\x03"); return err }, ""},
		{"terminate", []string{"-t", "head", "--", "-n2"}, 143, func(p *os.Process) error { return p.Signal(syscall.SIGTERM) }, ""},
		{"alarm", []string{"-t", "head", "--", "-n2"}, 125, func(p *os.Process) error { return p.Signal(syscall.SIGALRM) }, "alarm clock"},
		{"fault", []string{"-t", "head", "--", "-n2"}, 125, func(p *os.Process) error { return p.Signal(syscall.SIGSEGV) }, "segmentation fault"},
	} {
		cmd := run(c.args...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if c.end != nil {
			wait.Until(t, "the program runs", func() error {
				if now, err := term.GetState(int(slave.Fd())); err != nil || *now == *before {
					return fmt.Errorf("the terminal is not in raw mode (%v)", err)
				}
				return nil
			})
			if _, err := master.WriteString("x\r"); err != nil {
				t.Fatal(err)
			}
			sees("x") // the echo of the program's terminal
			sees("x") // head
			if err := c.end(cmd.Process); err != nil {
				t.Error(err)
			}
		}
		_ = cmd.Wait()
		if c.want != "" {
			sees(c.want)
		}
		if code := cmd.ProcessState.ExitCode(); code != c.status {
			t.Errorf("%s: exit %d, want %d", c.name, code, c.status)
		}
		after, err := term.GetState(int(slave.Fd()))
		if err != nil || *after != *before {
			t.Errorf("%s: the terminal is %+v, %v; want %+v", c.name, after, err, before)
		}
	}
}

// terminal returns both ends of one with 33 rows and 99 columns.
func terminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = master.Close() })
	fd := int(master.Fd())
	err = errors.Join(unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0), unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 33, Col: 99}))
	if err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = slave.Close() })
	return master, slave
}

// helperOf returns the process of a service's helper.
func helperOf(t *testing.T, service int) (pid int) {
	t.Helper()
	children := ""
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", service))
	for _, task := range tasks {
		b, _ := os.ReadFile(task)
		children += " " + string(b)
	}
	for _, child := range strings.Fields(children) {
		if b, err := os.ReadFile("/proc/" + child + "/cmdline"); err == nil && bytes.Contains(b, []byte("\x00--helper\x00")) {
			if pid, err = strconv.Atoi(child); err == nil {
				return pid
			}
		}
	}
	t.Fatalf("no helper among %q", children)
	return 0
}

// ownSeconds returns an argument for sleep that no other test has, also of another run.
func ownSeconds() string { return fmt.Sprint(1e9 + rand.Int64N(1e9)) }

// sleeps returns nil if the job that sleeps so long runs, or does not.
func sleeps(seconds string, want bool) error {
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, l := range lines {
		if b, err := os.ReadFile(l); err == nil && string(b) == "/bin/sleep\x00"+seconds+"\x00" {
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
