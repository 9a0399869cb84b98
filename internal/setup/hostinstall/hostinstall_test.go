// SPDX-License-Identifier: Apache-2.0

package hostinstall

import (
	"context"
	"encoding/xml"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf16"
)

// desk is a System that notes what is done.
type desk struct {
	done  []string
	files map[string][]byte
	fails map[string]bool // commands, by their beginning
	busy  map[string]int  // commands, by their beginning, that fail this often
}

func (d *desk) Run(_ context.Context, name string, args ...string) error {
	line := strings.Join(append([]string{name}, args...), " ")
	d.done = append(d.done, line)
	for f := range d.fails {
		if strings.HasPrefix(line, f) {
			return errors.New("it failed")
		}
	}
	for f, n := range d.busy {
		if strings.HasPrefix(line, f) && n > 0 {
			d.busy[f]--
			return errors.New("it is busy")
		}
	}
	return nil
}

// ran returns what was run that begins so.
func (d *desk) ran(beginning string) []string {
	return slices.DeleteFunc(slices.Clone(d.done), func(line string) bool { return !strings.HasPrefix(line, beginning) })
}

func (d *desk) WriteFile(name string, b []byte) error {
	if d.files == nil {
		d.files = make(map[string][]byte)
	}
	d.files[name] = b
	d.done = append(d.done, "write "+name)
	return nil
}

func (d *desk) Remove(name string) error {
	d.done = append(d.done, "remove "+name)
	if _, ok := d.files[name]; !ok {
		return fs.ErrNotExist
	}
	return nil
}

func (d *desk) ReadFile(name string) ([]byte, error) {
	b, ok := d.files[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return b, nil
}

var logons = map[string]Logon{
	"windows": {OS: "windows", Program: `C:\Program Files\fairlead.exe`, Args: []string{"host", "--log-file", `C:\a & b\`}, Home: `C:\Users\u`, User: "S-1-5-21-1"},
	"darwin":  {OS: "darwin", Program: "/usr/local/bin/fairlead", Args: []string{"host", "--bind", "a<b"}, Home: "/Users/u", User: "501"},
	"linux":   {OS: "linux", Program: "/opt/fair lead", Args: []string{"host", "--config", `/x/100%$"y`}, Home: "/home/u"},
}

func TestInstallAndUninstall(t *testing.T) {
	for os, want := range map[string]struct{ install, uninstall []string }{
		"windows": {
			[]string{
				`write C:\Users\u\AppData\Local\Temp\fairlead-task.xml`,
				`schtasks.exe /End /TN fairlead host`,
				`schtasks.exe /Create /F /TN fairlead host /XML C:\Users\u\AppData\Local\Temp\fairlead-task.xml`,
				`remove C:\Users\u\AppData\Local\Temp\fairlead-task.xml`,
				`schtasks.exe /Run /TN fairlead host`,
			},
			[]string{`schtasks.exe /Query /TN fairlead host`, `schtasks.exe /End /TN fairlead host`, `schtasks.exe /Delete /F /TN fairlead host`},
		},
		"darwin": {
			[]string{
				"write /Users/u/Library/LaunchAgents/dev.fairlead.host.plist",
				"launchctl print gui/501/dev.fairlead.host",
				"launchctl bootout gui/501/dev.fairlead.host",
				"launchctl bootstrap gui/501 /Users/u/Library/LaunchAgents/dev.fairlead.host.plist",
			},
			[]string{"launchctl bootout gui/501/dev.fairlead.host", "remove /Users/u/Library/LaunchAgents/dev.fairlead.host.plist"},
		},
		"linux": {
			[]string{
				"write /home/u/.config/systemd/user/fairlead-host.service",
				"systemctl --user daemon-reload", "systemctl --user enable fairlead-host.service", "systemctl --user restart fairlead-host.service",
			},
			[]string{"systemctl --user disable --now fairlead-host.service", "remove /home/u/.config/systemd/user/fairlead-host.service", "systemctl --user daemon-reload"},
		},
	} {
		d := &desk{}
		if err := Install(t.Context(), d, logons[os]); err != nil || !slices.Equal(d.done, want.install) {
			t.Errorf("install on %s: %v\n%q, want\n%q", os, err, d.done, want.install)
		}
		d.done = nil
		if found, err := Uninstall(t.Context(), d, logons[os]); !found || err != nil || !slices.Equal(d.done, want.uninstall) {
			t.Errorf("uninstall on %s: %v, %v\n%q, want\n%q", os, found, err, d.done, want.uninstall)
		}
	}
	// Where nothing is installed, all commands may fail, and the unit of a package stays on.
	for os := range logons {
		d := &desk{fails: map[string]bool{"schtasks.exe": true, "launchctl": true, "systemctl": true}}
		if found, err := Uninstall(t.Context(), d, logons[os]); found || err != nil || os == "linux" && len(d.done) > 0 {
			t.Errorf("uninstall of nothing on %s: %v, %v, %q", os, found, err, d.done)
		}
	}
	for os, fails := range map[string]string{"windows": "schtasks.exe /Create", "darwin": "launchctl", "linux": "systemctl --user enable"} {
		d := &desk{fails: map[string]bool{fails: true}}
		if err := Install(t.Context(), d, logons[os]); err == nil {
			t.Errorf("on %s %q failed and nobody says so", os, fails)
		}
		if n := len(d.ran("launchctl bootstrap")); os == "darwin" && n != 1 {
			t.Errorf("%q: nothing was running, so there is nothing to wait for", d.done)
		}
	}
	if err := Install(t.Context(), &desk{}, Logon{OS: "plan9"}); err == nil {
		t.Error("installed on plan9")
	}
}

// A task that runs ignores that it is to be run, and keeps the program and flags of before.
func TestInstallEndsTheTaskThatRuns(t *testing.T) {
	d := &desk{fails: map[string]bool{"schtasks.exe /End": true}}
	if err := Install(t.Context(), d, logons["windows"]); err != nil || len(d.ran("schtasks.exe /Run")) != 1 {
		t.Errorf("with none that runs: %v, %q", err, d.done)
	}
}

// The Task Scheduler may end conhost alone. What goes on is named: it has the ports, and the
// control socket.
func TestHostPeerThatOutlivesItsTask(t *testing.T) {
	for answers, want := range map[int]string{0: "", 3: "", 1000: "end fairlead.exe in the Task Manager"} {
		for what, do := range map[string]func(context.Context, System, Logon) error{
			"/Run":    Install,
			"/Delete": func(ctx context.Context, s System, l Logon) error { _, err := Uninstall(ctx, s, l); return err },
		} {
			synctest.Test(t, func(t *testing.T) {
				d, l, left := &desk{}, logons["windows"], answers
				l.Answers = func(context.Context) bool {
					left--
					return left >= 0
				}
				began := time.Now()
				err := do(t.Context(), d, l)
				if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) || len(d.ran("schtasks.exe "+what)) != 1 {
					t.Errorf("%s, answers %d times: %v, %q; want %q", what, answers, err, d.done, want)
				}
				if took := time.Since(began); took > time.Minute {
					t.Errorf("it took %s", took)
				}
			})
		}
	}
}

// launchctl bootout returns before the agent of before has ended.
func TestInstallWaitsForTheLaunchAgentOfBefore(t *testing.T) {
	for busy, want := range map[int]string{0: "", 3: "", 4: "", 1000: "it is busy"} {
		synctest.Test(t, func(t *testing.T) {
			d := &desk{busy: map[string]int{"launchctl bootstrap": busy}}
			if busy == 4 { // "Operation now in progress"
				d.fails = map[string]bool{"launchctl bootout": true}
			}
			began := time.Now()
			err := Install(t.Context(), d, logons["darwin"])
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("busy %d times: %v, want %q", busy, err, want)
			}
			if took := time.Since(began); took > time.Minute {
				t.Errorf("it took %s", took)
			}
			if n := len(d.ran("launchctl bootout")); n != 1 {
				t.Errorf("bootout %d times", n)
			}
		})
	}
}

// `systemctl --user edit --full` of a package's unit makes a file where ours would be.
func TestUnitOfTheUserStays(t *testing.T) {
	l := logons["linux"]
	d := &desk{files: map[string][]byte{l.unitPath(): []byte("[Service]\n")}}
	err := Install(t.Context(), d, l)
	found, uerr := Uninstall(t.Context(), d, l)
	for _, err := range []error{err, uerr} {
		if err == nil || !strings.Contains(err.Error(), l.unitPath()+" was not written by") {
			t.Error(err)
		}
	}
	if found || len(d.done) > 0 {
		t.Errorf("found %v, did %q", found, d.done)
	}
}

// The unit stays, so the error names it and how to go on.
func TestInstallAdvisesAfterAFailedSystemctl(t *testing.T) {
	l := logons["linux"]
	for _, fail := range []string{"systemctl --user daemon-reload", "systemctl --user enable", "systemctl --user restart"} {
		err := Install(t.Context(), &desk{fails: map[string]bool{fail: true}}, l)
		for _, want := range []string{"it failed", l.unitPath(), "log in as this user", "`fairlead host install` again", "`fairlead host uninstall`"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", fail, err, want)
			}
		}
	}
}

// By su, sudo or cron there is no user bus: nobody stops what runs, and nothing may be left
// that starts it again.
func TestUninstallWithoutAUserBus(t *testing.T) {
	d, l := &desk{}, logons["linux"]
	if err := Install(t.Context(), d, l); err != nil {
		t.Fatal(err)
	}
	d.done, d.fails = nil, map[string]bool{"systemctl": true}
	found, err := Uninstall(t.Context(), d, l)
	for _, want := range []string{"it failed", "log in as this user", "`systemctl --user stop fairlead-host.service`"} {
		if !found || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, %v, want %q", found, err, want)
		}
	}
	if want := []string{"remove " + l.unitPath(), "remove " + l.wantPath()}; !slices.Equal(d.ran("remove"), want) {
		t.Errorf("did %q, want %q", d.done, want)
	}
}

func TestTaskKeepsWordsApart(t *testing.T) {
	b := toUTF16(logons["windows"].task())
	units := make([]uint16, 0, len(b)/2)
	for i := 2; i < len(b); i += 2 {
		units = append(units, uint16(b[i])|uint16(b[i+1])<<8)
	}
	text := strings.Replace(string(utf16.Decode(units)), "UTF-16", "UTF-8", 1)
	var task struct {
		Trigger string `xml:"Triggers>LogonTrigger>UserId"`
		User    string `xml:"Principals>Principal>UserId"`
		Level   string `xml:"Principals>Principal>RunLevel"`
		Limit   string `xml:"Settings>ExecutionTimeLimit"`
		Again   string `xml:"Triggers>TimeTrigger>Repetition>Interval"`
		Until   string `xml:"Triggers>TimeTrigger>Repetition>Duration"`
		Since   string `xml:"Triggers>TimeTrigger>StartBoundary"`
		Several string `xml:"Settings>MultipleInstancesPolicy"`
		Failure string `xml:"Settings>RestartOnFailure>Interval"`
		Args    string `xml:"Actions>Exec>Arguments"`
	}
	if err := xml.Unmarshal([]byte(text), &task); err != nil {
		t.Fatal(err)
	}
	if want := `--headless "C:\Program Files\fairlead.exe" host --log-file "C:\a & b\\"`; task.Args != want {
		t.Errorf("arguments %s, want %s", task.Args, want)
	}
	// conhost ends with 0 whatever becomes of fairlead, so the Task Scheduler sees no failure.
	if task.Again != "PT1M" || task.Until != "" || task.Since != "2000-01-01T00:00:00" || task.Several != "IgnoreNew" || task.Failure != "" {
		t.Errorf("started again: %+v", task)
	}
	if task.User != "S-1-5-21-1" || task.Trigger != task.User || task.Level != "LeastPrivilege" || task.Limit != "PT0S" {
		t.Errorf("%+v", task)
	}
}

func TestWindowsQuote(t *testing.T) {
	for in, want := range map[string]string{
		``: `""`, `a`: `a`, `a b`: `"a b"`, `a"b`: `"a\"b"`, `a\"b`: `"a\\\"b"`, `a \`: `"a \\"`, `C:\x`: `C:\x`,
	} {
		if got := windowsQuote(in); got != want {
			t.Errorf("%s is quoted %s, want %s", in, got, want)
		}
	}
}

func TestAgentAndUnitKeepWordsApart(t *testing.T) {
	if got := logons["darwin"].plist(); !strings.Contains(got, "<string>a&lt;b</string>") {
		t.Error(got)
	}
	want := `ExecStart="/opt/fair lead" "host" "--config" "/x/100%%$$\"y"` + "\n"
	if got := logons["linux"].unit(); !strings.Contains(got, want) {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// Which of the two units runs makes no difference: that of a package, or this one.
func TestUnitIsThatOfPackages(t *testing.T) {
	directives := func(unit string) (list []string) {
		for line := range strings.Lines(unit) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "ExecStart=") {
				list = append(list, line)
			}
		}
		return list
	}
	b, err := os.ReadFile("../../../deploy/systemd/fairlead-host.service")
	if err != nil {
		t.Fatal(err)
	}
	got := logons["linux"].unit()
	if want := directives(string(b)); !slices.Equal(directives(got), want) {
		t.Errorf("%s\nwant the directives %q", got, want)
	}
	if !strings.HasPrefix(got, "# Written by `fairlead host install`; `fairlead host uninstall` removes it.\n[Unit]\n") || strings.Count(got, "ExecStart=") != 1 {
		t.Error(got)
	}
}

// With NoNewPrivileges a program that setcap(8) gave the capability for low ports starts
// without. The host peer sets no_new_privs itself (package privilege).
func TestUnitLeavesCapabilitiesOfTheFile(t *testing.T) {
	if got := logons["linux"].unit(); strings.Contains(got, "\nNoNewPrivileges=") {
		t.Error(got)
	}
}

func TestUnitHasEnvironment(t *testing.T) {
	l := logons["linux"]
	l.Env = []string{`XDG_CONFIG_HOME=/a "b"/50%$c`, "XDG_STATE_HOME=/s"}
	want := `[Service]` + "\n" + `Environment="XDG_CONFIG_HOME=/a \"b\"/50%%$c"` + "\n" + `Environment="XDG_STATE_HOME=/s"` + "\nExecStart="
	if got := l.unit(); !strings.Contains(got, want) {
		t.Errorf("%s\nwant %s", got, want)
	}
}

func TestMachineWritesAndRemoves(t *testing.T) {
	name := filepath.Join(t.TempDir(), "a", "b", "file")
	var m Machine
	if err := m.WriteFile(name, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if b, err := m.ReadFile(name); string(b) != "x" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	if err := m.Remove(name); err != nil {
		t.Error(err)
	}
	if _, err := m.ReadFile(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("removed: %v", err)
	}
	if found, err := removed(m.Remove(name)); found || err != nil {
		t.Errorf("%v, %v", found, err)
	}
	if err := m.Run(t.Context(), "fairlead-no-such-program"); err == nil || !strings.Contains(err.Error(), "no-such") {
		t.Error(err)
	}
}

func TestErrorOfACommandWithoutOutput(t *testing.T) {
	for command, want := range map[string]string{
		"exit 3": "sh -c exit 3: exit status 3, without a message", "echo no >&2; exit 3": `sh -c echo no >&2; exit 3: exit status 3: "no"`,
	} {
		if err := (Machine{}).Run(t.Context(), "sh", "-c", command); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
