// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package deploy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/program"
)

const (
	unit    = "../../deploy/systemd/fairlead-agent.service"
	runUnit = "../../deploy/systemd/fairlead-run.service"
	openrc  = "../../deploy/openrc/fairlead-agent"
	wsl     = "../../deploy/wsl/wsl.conf"

	installed = "/usr/local/bin/fairlead" // where all of them expect the program
)

func build(t *testing.T) string {
	t.Helper()
	path, err := program.Path(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestUnitIsValidAndHardened(t *testing.T) {
	// 3.1 when this was written. Find out why if it rises.
	wantReasons(t, wantHardened(t, unit, build(t), "31"))
}

// That of fairlead-run has what becoming other users takes, and is not wider otherwise.
func TestRunUnitIsValidAndHardened(t *testing.T) {
	path, err := program.RunPath(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	copied := wantHardened(t, runUnit, path, "36")
	_, rest, _ := strings.Cut(read(t, copied), "\nCapabilityBoundingSet=")
	line, _, _ := strings.Cut(rest, "\n")
	const want = "CAP_SETUID CAP_SETGID CAP_KILL CAP_SYS_PTRACE"
	if line != want || privilege.Runner()|privilege.RunServer() != 1<<unix.CAP_SETUID|1<<unix.CAP_SETGID|1<<unix.CAP_KILL|1<<unix.CAP_SYS_PTRACE {
		t.Errorf("the unit gives %q, want %q, as the program keeps", line, want)
	}
}

// wantHardened copies a unit, with where its program is, and has systemd judge it.
func wantHardened(t *testing.T, unit, path, threshold string) (copied string) {
	t.Helper()
	dir := t.TempDir()
	copied = filepath.Join(dir, filepath.Base(unit))
	text := strings.ReplaceAll(read(t, unit), "=/usr/local/bin/"+filepath.Base(path), "="+path)
	if err := os.WriteFile(copied, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	// Where no system has been installed, the targets that units name are missing.
	for _, target := range []string{"local-fs", "multi-user", "sysinit", "basic", "shutdown"} {
		if err := os.WriteFile(filepath.Join(dir, target+".target"), []byte("[Unit]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.Command("systemd-analyze", "verify", "--man=no", copied).CombinedOutput()
	if err != nil || strings.Contains(string(out), filepath.Base(unit)) {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	out, err = exec.Command("systemd-analyze", "security", "--offline=true", "--threshold="+threshold, copied).CombinedOutput()
	if err != nil {
		t.Errorf("systemd-analyze security: %v\n%s", err, out)
	}
	return copied
}

// wantReasons compares what systemd counts against a unit to the table of docs/privileges.md,
// which has a reason for each.
func wantReasons(t *testing.T, copied string) {
	t.Helper()
	out, err := exec.Command("systemd-analyze", "security", "--offline=true", "--no-pager", "--json=short", copied).Output()
	if err != nil {
		t.Fatal(err)
	}
	var settings []struct {
		Name     string
		Set      *bool
		Exposure string
	}
	if err := json.Unmarshal(out, &settings); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, s := range settings {
		if s.Set != nil && !*s.Set {
			want = append(want, fmt.Sprintf("| `%s` | %s", strings.ReplaceAll(s.Name, "|", `\|`), s.Exposure))
		}
	}
	_, table, _ := strings.Cut(read(t, "../../docs/privileges.md"), "<!-- exposure -->\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var got []string
	for i, line := range strings.Split(table, "\n") {
		if cell := strings.LastIndex(strings.TrimSuffix(line, " |"), " | "); i > 1 && cell > 0 {
			got = append(got, line[:cell])
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("docs/privileges.md has\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// The unit and OpenRC's script give what the agent's table names, and nothing else.
func TestCapabilitiesAreThoseOfTheTable(t *testing.T) {
	var unitNames, openrcNames []string
	for _, n := range append(privilege.Agent(), privilege.UserSockets()) {
		if n.Unit() {
			unitNames = append(unitNames, n.Name)
			openrcNames = append(openrcNames, "^"+strings.ToLower(n.Name))
		}
	}
	set := func(names []string) string { slices.Sort(names); return strings.Join(names, " ") }
	_, rest, _ := strings.Cut(read(t, unit), "\nCapabilityBoundingSet=")
	line, _, _ := strings.Cut(rest, "\n")
	if got, want := set(strings.Fields(line)), set(unitNames); got != want {
		t.Errorf("the unit gives %s, want %s", got, want)
	}
	_, rest, _ = strings.Cut(read(t, openrc), `capabilities="`)
	line, _, _ = strings.Cut(rest, `"`)
	if got, want := set(strings.Split(line, ",")), set(openrcNames); got != want {
		t.Errorf("OpenRC's script names %s, want %s", got, want)
	}
}

// The agent needs no other capabilities than those of the unit.
func TestUnitsCapabilitiesAreEnough(t *testing.T) {
	var caps []string
	for line := range strings.Lines(read(t, unit)) {
		if list, ok := strings.CutPrefix(line, "CapabilityBoundingSet="); ok {
			for _, c := range strings.Fields(list) {
				caps = append(caps, "+"+strings.ToLower(strings.TrimPrefix(c, "CAP_")))
			}
		}
	}
	if len(caps) == 0 {
		t.Fatal("the unit names no capabilities")
	}
	binary := build(t)
	// systemd mounts tracefs, which a container may lack.
	mounted := []string{"unshare", "--mount", "--propagation", "private", "sh", "-euc",
		`mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing; exec "$@"`, "sh"}
	methods := func(prefix ...string) (string, string) {
		a := start(t, exec.Command, append(slices.Concat(mounted, prefix, []string{binary}), "agent", "--sink", "listener", "--listener-settle", "50ms", "--source", "socket,nat")...)
		list := a.ready(t)
		var out []string
		for _, s := range list.Sources {
			out = append(out, fmt.Sprintf("%s %s %s %s", s.Name, s.State, s.Method, s.Error))
		}
		a.prints(t, "bind conflicts are detected", "bind conflicts cannot be detected") // only after the sources
		a.Stop(os.Interrupt)
		return strings.Join(out, "\n"), a.Output()
	}
	all, allLog := methods()
	few, fewLog := methods("setpriv", "--no-new-privs", "--bounding-set=-all,"+strings.Join(caps, ","), "--inh-caps=-all", "--")
	if all != few {
		t.Errorf("with all capabilities:\n%s\nwith those of the unit:\n%s\n%s", all, few, fewLog)
	}
	for _, line := range []string{"bind conflicts are detected", "polling legacy iptables tables"} {
		if a, b := strings.Contains(allLog, line), strings.Contains(fewLog, line); a != b {
			t.Errorf("%q logged with all capabilities: %v, with those of the unit: %v", line, a, b)
		}
	}
}

func TestOpenRCScript(t *testing.T) {
	if out, err := exec.Command("sh", "-n", openrc).CombinedOutput(); err != nil {
		t.Errorf("sh -n: %v\n%s", err, out)
	}
	if st, err := os.Stat(openrc); err != nil || st.Mode()&0o111 == 0 {
		t.Errorf("mode %v, %v: want it executable", st.Mode(), err)
	}
	// A shell stands for openrc-run: it reads the script and calls its functions.
	play := `set -eu
RC_SVCNAME=fairlead-agent
checkpath() { echo "checkpath $*"; }; ebegin() { :; }; eend() { return "$1"; }
need() { echo "need $*"; }; use() { echo "use $*"; }; after() { :; }
supervise-daemon() { echo "supervise-daemon $*"; }
. "$1"
depend; start_pre; reload
echo "$command $command_args"
echo "ulimit $rc_ulimit"
`
	out, err := exec.Command("bash", "-c", play, "bash", openrc).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{
		"use localmount ", "ulimit -n 65536", "checkpath --directory --mode 0700 /run/fairlead", "checkpath --directory --mode 0700 /var/lib/fairlead",
		"supervise-daemon fairlead-agent --signal HUP --pidfile /run/fairlead-agent.pid", installed + " agent",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	// Debian's OpenRC has no service of any name that others have.
	if strings.Contains(string(out), "need ") {
		t.Errorf("the service does not start where another is missing:\n%s", out)
	}
}

// The line of wsl.conf returns at once, as WSL wants it, and leaves the agent running.
func TestBootCommandOfWSL(t *testing.T) {
	command := ""
	for line := range strings.Lines(read(t, wsl)) {
		if c, ok := strings.CutPrefix(line, "command = "); ok {
			command = strings.TrimSpace(c)
		}
	}
	log := filepath.Join(t.TempDir(), "log")
	// The process that the shell leaves behind prints its pid, so that the test can end
	// it.
	command = strings.NewReplacer(installed, build(t), "/var/log/fairlead.log", log).Replace(command) + "\necho $!"
	if !strings.Contains(command, log) {
		t.Fatalf("command %q", command)
	}
	a := start(t, func(string, ...string) *exec.Cmd { return exec.Command("sh", "-c", command) }, "")
	if wait.For(t, "its end", a.Done()); a.ExitCode() != 0 {
		t.Fatalf("exit code %d\n%s", a.ExitCode(), a.Output())
	}
	pid, err := strconv.Atoi(strings.TrimSpace(a.Output()))
	if err != nil {
		t.Fatal(err)
	}
	left, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	// The agent writes files until its end, in directories that are removed after the test.
	t.Cleanup(func() {
		defer func() { _ = unix.Close(left) }()
		if err := unix.PidfdSendSignal(left, unix.SIGTERM, nil, 0); err != nil {
			t.Error(err)
		}
		end := []unix.PollFd{{Fd: int32(left), Events: unix.POLLIN}}
		if n, err := unix.Poll(end, int(wait.Limit().Milliseconds())); n != 1 {
			t.Errorf("the agent does not end: %v", err)
		}
	})
	a.ready(t)
}

// running is an agent in a network namespace of its own.
type running struct {
	*program.Process
	control string
}

// start starts the command that make returns for the arguments. The environment has the
// paths of its files.
func start(t *testing.T, make func(string, ...string) *exec.Cmd, args ...string) *running {
	t.Helper()
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	dir := t.TempDir()
	cmd, control := make(args[0], args[1:]...), filepath.Join(dir, "run", "c")
	cmd.Env = append(os.Environ(), "FAIRLEAD_CONTROL="+control, "FAIRLEAD_LINK=unix://"+filepath.Join(dir, "link", "l"),
		"FAIRLEAD_LINK_TOKEN="+filepath.Join(dir, "token"))
	return &running{program.Start(t, program.Command{Cmd: cmd, In: ns}), control}
}

// prints waits until the agent's log has one of the texts.
func (r *running) prints(t *testing.T, texts ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit())
	defer cancel()
	if _, err := r.Wait(ctx, func(line string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(line, text) })
	}); err != nil {
		t.Fatalf("the log has none of %q: %v", texts, err)
	}
}

// ready waits until every source of the agent is complete.
func (r *running) ready(t *testing.T) status.List {
	t.Helper()
	var l status.List
	wait.Until(t, "the agent is ready", func() (err error) {
		ctx, cancel := context.WithTimeout(t.Context(), wait.Limit())
		defer cancel()
		l, err = status.NewClient(r.control).List(ctx)
		if err == nil && !l.Ready() {
			err = errors.New("not ready")
		}
		return err
	})
	return l
}
