// SPDX-License-Identifier: Apache-2.0

//go:build linux

package agentinstall

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/config/trust"
)

// machine is a root directory, and what was run in it.
type machine struct {
	root string
	run  []string
	fail string // the beginning of commands that fail
}

func newMachine(t *testing.T, files map[string]string) *machine {
	t.Helper()
	m := &machine{root: t.TempDir()}
	for name, text := range files {
		path := filepath.Join(m.root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(name, "/") {
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// program is one that only root can change.
const program = "/bin/true"

func (m *machine) options(args ...string) Options {
	return Options{
		Root: m.root, Program: program, Args: append([]string{"agent"}, args...),
		Run: func(_ context.Context, name string, args ...string) error {
			line := strings.Join(append([]string{name}, args...), " ")
			m.run = append(m.run, line)
			if m.fail != "" && strings.HasPrefix(line, m.fail) {
				return errors.New("it failed")
			}
			return nil
		},
	}
}

// files returns the text of all files.
func (m *machine) files(t *testing.T) map[string]string {
	t.Helper()
	found := make(map[string]string)
	err := fs.WalkDir(os.DirFS(m.root), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(filepath.Join(m.root, path))
		found[path] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

const wslRelease = "5.15.167.4-microsoft-standard-WSL2\n"

var machines = []struct {
	name               string
	files              map[string]string
	want               Init
	file               string // that is made or changed
	mode               fs.FileMode
	install, uninstall []string
}{
	{
		"systemd", map[string]string{"run/systemd/system/": "", "proc/sys/kernel/osrelease": wslRelease}, Systemd, unitFile, 0o644,
		[]string{"systemctl daemon-reload", "systemctl enable fairlead-agent", "systemctl restart fairlead-agent"},
		[]string{"systemctl disable --now fairlead-agent", "systemctl daemon-reload"},
	},
	{
		"OpenRC", map[string]string{"run/openrc/": "", "proc/sys/kernel/osrelease": "6.6.1\n"}, OpenRC, rcFile, 0o755,
		[]string{"rc-update add fairlead-agent default", "rc-service fairlead-agent restart"},
		[]string{"rc-update delete fairlead-agent default", "rc-service --ifstarted fairlead-agent stop"},
	},
	{"WSL", map[string]string{"proc/sys/kernel/osrelease": wslRelease}, WSL, wslFile, 0o644, nil, nil},
	{
		"WSL with a configuration",
		map[string]string{"proc/sys/kernel/osrelease": wslRelease, "etc/wsl.conf": "[user]\ndefault = u\n[Boot]\n\n[network]\ncommand=no\n"}, WSL, wslFile, 0o644, nil, nil,
	},
}

func TestInstallAndUninstall(t *testing.T) {
	for _, tt := range machines {
		t.Run(tt.name, func(t *testing.T) {
			m := newMachine(t, tt.files)
			before := m.files(t)
			if init, err := Install(t.Context(), m.options("--log-level=debug")); err != nil || init != tt.want || !slices.Equal(m.run, tt.install) {
				t.Fatalf("%s, %v, %q", init, err, m.run)
			}
			once := m.files(t)
			if text := once[tt.file]; !strings.Contains(text, marker) || !strings.Contains(text, program) || !strings.Contains(text, "--log-level=debug") {
				t.Errorf("%s is\n%s", tt.file, text)
			}
			if fi, err := os.Stat(m.options().path(tt.file)); err != nil || fi.Mode().Perm() != tt.mode {
				t.Errorf("%v, %v", fi.Mode(), err)
			}
			m.run = nil
			if _, err := Install(t.Context(), m.options("--log-level=debug")); err != nil || !maps.Equal(m.files(t), once) || !slices.Equal(m.run, tt.install) {
				t.Errorf("again: %v, %q, files %v", err, m.run, m.files(t))
			}
			m.run = nil
			if r, err := Uninstall(t.Context(), m.options()); err != nil || !r.Found || !slices.Equal(m.run, tt.uninstall) {
				t.Errorf("uninstall: %+v, %v, %q", r, err, m.run)
			}
			if after := m.files(t); !maps.Equal(after, before) {
				t.Errorf("left %v, before there was %v", after, before)
			}
			m.run = nil
			if r, err := Uninstall(t.Context(), m.options()); err != nil || r.Found || len(m.run) > 0 {
				t.Errorf("nothing to uninstall: %+v, %v, %q", r, err, m.run)
			}
		})
	}
}

func TestInstallForAnotherInitReplacesTheFirst(t *testing.T) {
	m := newMachine(t, nil)
	o := m.options()
	o.Init = WSL
	if _, err := Install(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	o.Init = Systemd
	if _, err := Install(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if got := slices.Collect(maps.Keys(m.files(t))); !slices.Equal(got, []string{unitFile}) {
		t.Errorf("files %q", got)
	}
}

func TestInstallRefuses(t *testing.T) {
	systemd := map[string]string{"run/systemd/system/": ""}
	for _, tt := range []struct {
		name  string
		files map[string]string
		args  []string
		fail  string
		want  string // in the error
	}{
		{"no init", nil, nil, "", "neither systemd, OpenRC nor WSL"},
		{"a package's unit", map[string]string{"run/systemd/system/": "", packaged[0]: "x"}, nil, "", "belongs to a package"},
		{"a unit put there by hand", map[string]string{"run/systemd/system/": "", unitFile: "x"}, nil, "", "was not written by"},
		{"a script of a package", map[string]string{"run/openrc/": "", rcFile: "x"}, nil, "", "was not written by"},
		{"another boot command", map[string]string{"proc/sys/kernel/osrelease": wslRelease, wslFile: "[boot]\nCommand = true\n"}, nil, "", `boot command, "true"`},
		{"words for WSL that a shell would change", map[string]string{"proc/sys/kernel/osrelease": wslRelease}, []string{"--metrics-addr=$(id)"}, "", "cannot be in /etc/wsl.conf"},
		{"systemctl fails", systemd, nil, "systemctl enable", "it failed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMachine(t, tt.files)
			m.fail = tt.fail
			before := m.files(t)
			if _, err := Install(t.Context(), m.options(tt.args...)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			if after := m.files(t); tt.fail == "" && !maps.Equal(after, before) {
				t.Errorf("changed to %v", after)
			}
		})
	}
}

// A unit or script that nothing here reads starts no agent: of a deb in a WSL without
// systemd, or of an apk without OpenRC.
func TestInstallBesideFilesOfAnotherInit(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  Init
	}{
		{"WSL with a deb", map[string]string{"proc/sys/kernel/osrelease": wslRelease, packaged[0]: "x"}, WSL},
		{"WSL with an apk", map[string]string{"proc/sys/kernel/osrelease": wslRelease, rcFile: "x"}, WSL},
		{"WSL with a unit put there by hand", map[string]string{"proc/sys/kernel/osrelease": wslRelease, unitFile: "x"}, WSL},
		{"OpenRC with a deb", map[string]string{"run/openrc/": "", packaged[1]: "x"}, OpenRC},
		{"systemd with an apk", map[string]string{"run/systemd/system/": "", rcFile: "x"}, Systemd},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMachine(t, tt.files)
			before := m.files(t)
			if init, err := Install(t.Context(), m.options()); err != nil || init != tt.want {
				t.Fatalf("%s, %v", init, err)
			}
			if r, err := Uninstall(t.Context(), m.options()); err != nil || !r.Found || !maps.Equal(m.files(t), before) {
				t.Errorf("%+v, %v, left %v", r, err, m.files(t))
			}
		})
	}
}

// Once systemd is turned on, the boot command is in the way of the package's unit.
func TestInstallNamesTheBootCommandBesideAPackage(t *testing.T) {
	files := map[string]string{"proc/sys/kernel/osrelease": wslRelease, packaged[0]: "x"}
	m := newMachine(t, files)
	if _, err := Install(t.Context(), m.options()); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(m.root, "run/systemd/system"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Install(t.Context(), m.options()); err == nil || !strings.Contains(err.Error(), "run `fairlead agent uninstall`, then `systemctl enable --now fairlead-agent`") {
		t.Error(err)
	}
}

// Root would run a program that another user can replace.
func TestInstallRefusesProgramOfOthers(t *testing.T) {
	m := newMachine(t, map[string]string{"run/systemd/system/": "", "bin/fairlead": ""})
	o := m.options()
	o.Program = filepath.Join(m.root, "bin", "fairlead")
	if err := os.Chmod(filepath.Dir(o.Program), 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := Install(t.Context(), o); err == nil || !strings.Contains(err.Error(), "users other than root can change") {
		t.Error(err)
	}
	if len(m.run) > 0 {
		t.Errorf("ran %q", m.run)
	}
}

func TestUninstallLeavesWhatOthersMade(t *testing.T) {
	m := newMachine(t, map[string]string{unitFile: "x", rcFile: "y", wslFile: "[boot]\ncommand = true\n"})
	before := m.files(t)
	if r, err := Uninstall(t.Context(), m.options()); r.Found || err != nil || !maps.Equal(m.files(t), before) || len(m.run) > 0 {
		t.Errorf("%+v, %v, %q, files %v", r, err, m.run, m.files(t))
	}
}

// words are arguments that a shell or systemd would change if they were not quoted.
var words = []string{"agent", "--config", `/x/100%$"y'` + "`z` \\", "--link-token="}

func TestScriptKeepsWordsApart(t *testing.T) {
	o := Options{Program: "/opt/fair lead", Args: words}
	// supervise-daemon.sh of OpenRC evaluates command_args.
	play := `FAIRLEAD_ARGS="--log-level info"; RC_SVCNAME=x; . /dev/stdin; printf '%s\n' "$command"; eval printf "'%s\n'" "$command_args"`
	cmd := exec.Command("sh", "-euc", play)
	cmd.Stdin = strings.NewReader(o.script())
	out, err := cmd.CombinedOutput()
	if want := strings.Join(append([]string{"/opt/fair lead"}, append(slices.Clone(words), "--log-level", "info")...), "\n") + "\n"; err != nil || string(out) != want {
		t.Errorf("%v: got\n%swant\n%s", err, out, want)
	}
	if !strings.HasPrefix(o.script(), "#!/sbin/openrc-run\n"+marker+"\n") {
		t.Errorf("the script begins %q", o.script()[:100])
	}
}

func TestUnitKeepsWordsApart(t *testing.T) {
	unit := Options{Program: "/opt/fair lead", Args: words}.unit()
	want := "\nExecStart=" + `"/opt/fair lead" "agent" "--config" "/x/100%%$$\"y'` + "`z` " + `\\" "--link-token="` + "\n"
	if !strings.Contains(unit, want) || strings.Count(unit, "ExecStart=") != 1 {
		t.Errorf("%s\nwant %s", unit, want)
	}
}

func TestCommandOfWSL(t *testing.T) {
	got, err := Options{Program: "/opt/fairlead", Args: []string{"agent", "--sink=listener"}}.command()
	if want := "command = /opt/fairlead agent --sink=listener </dev/null >>/var/log/fairlead.log 2>&1 &"; err != nil || got != want {
		t.Errorf("%v, got %q, want %q", err, got, want)
	}
}

// Only the lines that withCommand adds are removed, whatever was edited around them.
func TestWithoutCommandKeepsEdits(t *testing.T) {
	const boot, command, network = "[boot]\n", "command = /opt/fairlead agent &\n", "[network]\nhostname = h\n"
	for _, tt := range []struct{ name, text, want string }{
		{"command commented out", marker + "\n" + boot + "#" + command + network, boot + "#" + command + network},
		{"command deleted", marker + "\n" + boot + network, boot + network},
		{"section and command deleted", marker + "\n" + network, network},
		{"marker at the end", network + marker, network},
		{"section at the end", network + marker + "\n" + boot, network + boot},
		{"another key first", marker + "\n" + boot + "commander = x\n", boot + "commander = x\n"},
		{"key after the command", marker + "\n" + boot + command + "systemd=true\n" + network, boot + "systemd=true\n" + network},
		{"key after an empty line", marker + "\n" + boot + command + "\nsystemd=true\n", boot + "\nsystemd=true\n"},
		{"comment after the command", network + marker + "\n" + boot + command + "#systemd=true\n", network + boot + "#systemd=true\n"},
		{"section after the command", marker + "\n" + boot + command + "\n" + network, "\n" + network},
		{"section of the user", boot + marker + "\n" + command + "systemd=true\n", boot + "systemd=true\n"},
		{"CRLF", strings.ReplaceAll(marker+"\n"+boot+command+network, "\n", "\r\n"), strings.ReplaceAll(network, "\n", "\r\n")},
		{"key above the command", marker + "\n" + boot + "systemd=true\n" + command + network, boot + "systemd=true\n" + network},
		{"comment and empty line above the command", marker + "\n" + boot + "# mine\n\n" + command, boot + "# mine\n\n"},
		{"empty line above the command", network + marker + "\n" + boot + "\n" + command, network + "\n"},
		{"key below the marker in a section of the user", boot + marker + "\nsystemd=true\n" + command + network, boot + "systemd=true\n" + network},
		{"command of the user in its place", marker + "\n" + boot + "command = service docker start\n", boot + "command = service docker start\n"},
		{"command in a later section", marker + "\n" + boot + network + command, boot + network + command},
		{"two markers", marker + "\n" + marker + "\n" + boot + command, ""},
	} {
		if got, _, err := withoutCommand(tt.text); got != tt.want || err != nil {
			t.Errorf("%s: %v, got\n%s\nwant\n%s", tt.name, err, got, tt.want)
		}
	}
}

// There can be one boot command, so what else starts with WSL is added to it.
func TestBootCommandOfTheUserStays(t *testing.T) {
	const agent = program + " agent --sink=auto </dev/null >>/var/log/fairlead.log 2>&1 &"
	for _, command := range []string{
		"service docker start; " + agent, "service docker start & " + agent, agent + " service docker start",
		program + " agent; service docker start", "sh -c '" + agent + "'",
	} {
		m := newMachine(t, map[string]string{"proc/sys/kernel/osrelease": wslRelease, wslFile: marker + "\n[boot]\ncommand = " + command + "\n"})
		before := m.files(t)
		_, ierr := Install(t.Context(), m.options("--sink=auto"))
		_, uerr := Uninstall(t.Context(), m.options())
		for _, err := range []error{ierr, uerr} {
			if err == nil || !strings.Contains(err.Error(), "more than fairlead in its boot command") {
				t.Errorf("%s: %v", command, err)
			}
		}
		if after := m.files(t); !maps.Equal(after, before) {
			t.Errorf("%s: changed to %v", command, after)
		}
	}
}

// A file that reads as empty, as /dev/null does, is not replaced either.
func TestInstallRefusesMaskAndLinks(t *testing.T) {
	for _, tt := range []struct{ name, file, target, want string }{
		{"mask", unitFile, "/dev/null", "systemctl unmask fairlead-agent"},
		{"empty unit", unitFile, "", "systemctl unmask fairlead-agent"},
		{"dangling link", unitFile, "/nowhere/x.service", "was not written by"},
		{"dangling link of OpenRC", rcFile, "/nowhere/x", "was not written by"},
		{"empty script", rcFile, "", "was not written by"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			init := map[string]string{unitFile: "run/systemd/system/", rcFile: "run/openrc/"}[tt.file]
			m := newMachine(t, map[string]string{init: "", tt.file: ""})
			path := m.options().path(tt.file)
			if tt.target != "" {
				if err := errors.Join(os.Remove(path), os.Symlink(tt.target, path)); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := Install(t.Context(), m.options()); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			if r, err := Uninstall(t.Context(), m.options()); r.Found || err != nil {
				t.Errorf("uninstall: %+v, %v", r, err)
			}
			if target, _ := os.Readlink(path); target != tt.target || len(m.run) > 0 {
				t.Errorf("link to %q, want %q; ran %q", target, tt.target, m.run)
			}
		})
	}
}

// A program that is where it belongs is not to be installed onto itself.
func TestAdviceAboutProgramOfOthers(t *testing.T) {
	dir := t.TempDir()
	real, link := filepath.Join(dir, "bin", "fairlead"), filepath.Join(dir, "link", "fairlead")
	if err := errors.Join(os.Chmod(dir, 0o755), os.Mkdir(filepath.Dir(real), 0o755), os.WriteFile(real, nil, 0o755), os.Chmod(filepath.Dir(real), 0o777), os.Symlink("bin", filepath.Dir(link))); err != nil { //nolint:gosec // the test's matter
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, final string
		install     bool
	}{
		{"final place", real, false},
		{"final place behind a link", link, false},
		{"another place", filepath.Join(dir, "nowhere", "fairlead"), true},
	} {
		err := trusted(real, tt.final)
		if err == nil || !errors.Is(err, trust.ErrUntrusted) || !strings.HasPrefix(err.Error(), "users other than root can change "+real) || !strings.Contains(err.Error(), "chmod go-w "+filepath.Dir(real)) {
			t.Errorf("%s: %v", tt.name, err)
		}
		if err != nil && strings.Contains(err.Error(), "`install -m 0755 ") != tt.install {
			t.Errorf("%s: %v; want advice to install: %v", tt.name, err, tt.install)
		}
	}
	if err := os.Chmod(filepath.Dir(real), 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	if err := trusted(real, ""); err != nil {
		t.Errorf("sticky directory: %v", err)
	}
}

// Commands of an init that does not run may fail, or not be there at all.
func TestFilesOfAnotherInitAreRemoved(t *testing.T) {
	for _, tt := range []struct {
		name, file string
		machine    string // directory that its init makes
		init       Init
		fail       string
	}{
		{"unit where OpenRC runs", unitFile, "run/openrc/", OpenRC, "systemctl"},
		{"script where systemd runs", rcFile, "run/systemd/system/", Systemd, "rc-"},
		{"unit where no init runs", unitFile, "", "", "systemctl"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			files := map[string]string{tt.file: marker + "\n"}
			if tt.machine != "" {
				files[tt.machine] = ""
			}
			for name, remove := range map[string]func(Options) error{
				"uninstall": func(o Options) error { _, err := Uninstall(t.Context(), o); return err },
				"install":   func(o Options) error { _, err := Install(t.Context(), o); return err },
			} {
				if name == "install" && tt.init == "" {
					continue
				}
				m := newMachine(t, files)
				m.fail = tt.fail
				if err := remove(m.options()); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if _, left := m.files(t)[tt.file]; left {
					t.Errorf("%s left /%s", name, tt.file)
				}
			}
		})
	}
}

// The file stays while the agent that it started may still run.
func TestUninstallReportsFailedStop(t *testing.T) {
	m := newMachine(t, map[string]string{"run/systemd/system/": "", unitFile: marker + "\n"})
	m.fail = "systemctl disable"
	if r, err := Uninstall(t.Context(), m.options()); r.Found || err == nil {
		t.Errorf("%+v, %v; want an error", r, err)
	}
	if _, ok := m.files(t)[unitFile]; !ok {
		t.Error("the unit was removed")
	}
}

// What was written stays, so the error names it and how to go on.
func TestInstallAdvisesAfterAFailedCommand(t *testing.T) {
	for _, tt := range []struct{ machine, fail, file, log string }{
		{"run/systemd/system/", "systemctl daemon-reload", unitFile, "journalctl -u fairlead-agent"},
		{"run/systemd/system/", "systemctl restart", unitFile, "journalctl -u fairlead-agent"},
		{"run/openrc/", "rc-update", rcFile, "/var/log/fairlead.log"},
		{"run/openrc/", "rc-service", rcFile, "/var/log/fairlead.log"},
	} {
		t.Run(tt.fail, func(t *testing.T) {
			m := newMachine(t, map[string]string{tt.machine: ""})
			m.fail = tt.fail
			_, err := Install(t.Context(), m.options())
			for _, want := range []string{"it failed", "/" + tt.file, tt.log, "`fairlead agent install` again", "`fairlead agent uninstall`"} {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %q", err, want)
				}
			}
			m.fail = ""
			if r, err := Uninstall(t.Context(), m.options()); !r.Found || err != nil {
				t.Errorf("uninstall: %+v, %v", r, err)
			}
			if left := m.files(t); len(left) > 0 {
				t.Errorf("left %v", left)
			}
		})
	}
}
