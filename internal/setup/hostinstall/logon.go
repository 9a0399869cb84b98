// SPDX-License-Identifier: Apache-2.0

// Package hostinstall has the host peer started when its user logs on.
package hostinstall

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"strings"
	"time"
	"unicode/utf16"

	"github.com/fairlead/fairlead/deploy"
	"github.com/fairlead/fairlead/internal/config/trust"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Logon describes the host peer as a program that starts when its user logs on.
type Logon struct {
	OS      string   // runtime.GOOS
	Program string   // absolute path of fairlead
	Args    []string // after it: "host", flags
	Env     []string // "NAME=VALUE" for the program; on Linux only
	Home    string   // the user's, absolute
	User    string   // SID on Windows, user id on macOS, not used on Linux
	// Answers returns whether a host peer answers at the control socket. Nil is for none:
	// then nobody is asked. It is used on Windows only.
	Answers func(ctx context.Context) bool
}

// System performs the steps of an installation.
type System interface {
	// Run runs a command of the system; its output is in the error.
	Run(ctx context.Context, name string, args ...string) error
	// WriteFile makes a file, 0600, and its directories.
	WriteFile(path string, data []byte) error
	// Remove removes a file; fs.ErrNotExist if it is not there.
	Remove(path string) error
	// ReadFile reads a file; fs.ErrNotExist if it is not there.
	ReadFile(path string) ([]byte, error)
}

// Install starts the host peer now and at each logon. It replaces an existing
// installation.
//
// On Windows it uses a task of the Task Scheduler. A service would run as another user,
// but the WSL VM and the token belong to this one, and a task needs no administrator.
// On macOS it uses a launch agent, on Linux a user unit.
func Install(ctx context.Context, s System, l Logon) error {
	switch l.OS {
	case "windows":
		file := l.Home + `\AppData\Local\Temp\fairlead-task.xml`
		if err := s.WriteFile(file, toUTF16(l.task())); err != nil {
			return fmt.Errorf("install: %w", err)
		}
		// A task that runs ignores /Run, and would keep the program and flags of before.
		_ = s.Run(ctx, "schtasks.exe", "/End", "/TN", taskName) // it may not be running
		ended := l.ended(ctx)
		err := s.Run(ctx, "schtasks.exe", "/Create", "/F", "/TN", taskName, "/XML", file)
		if rerr := s.Remove(file); rerr != nil {
			err = errors.Join(err, rerr)
		}
		if err == nil {
			err = s.Run(ctx, "schtasks.exe", "/Run", "/TN", taskName)
		}
		if err == nil && ended != nil {
			err = fmt.Errorf("%w; the new one starts within a minute of that", ended)
		}
		return wrap("install", err)
	case "darwin":
		if err := s.WriteFile(l.plistPath(), []byte(l.plist())); err != nil {
			return fmt.Errorf("install: %w", err)
		}
		return wrap("install", l.bootstrap(ctx, s))
	case "linux":
		if err := l.ours(s); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("install: %w: remove it first", err)
		}
		if err := s.WriteFile(l.unitPath(), []byte(l.unit())); err != nil {
			return fmt.Errorf("install: %w", err)
		}
		for _, args := range [][]string{{"daemon-reload"}, {"enable", unitName}, {"restart", unitName}} {
			if err := s.Run(ctx, "systemctl", append([]string{"--user"}, args...)...); err != nil {
				return fmt.Errorf("install: %w; %s was written and stays: without a user bus, log in as this user (su and sudo start none), "+
					"then run `fairlead host install` again, or `fairlead host uninstall` to remove it", err, l.unitPath())
			}
		}
		return nil
	}
	return fmt.Errorf("install: %s is not known here: start `fairlead host` by hand", l.OS)
}

// How long the system may take to end the host peer of an earlier installation.
const (
	endTimeout = 15 * time.Second
	endPause   = 250 * time.Millisecond // between attempts
)

// bootstrap starts the launch agent in place of one that is there. launchctl bootout returns
// before that one has ended, with or without an error (36, "Operation now in progress"), and
// until then bootstrap fails.
func (l Logon) bootstrap(ctx context.Context, s System) error {
	there := Running(ctx, s, l)
	_ = s.Run(ctx, "launchctl", "bootout", "gui/"+l.User+"/"+label)
	for deadline := time.Now().Add(endTimeout); ; {
		err := s.Run(ctx, "launchctl", "bootstrap", "gui/"+l.User, l.plistPath())
		if err == nil || !there || time.Now().After(deadline) {
			return err
		}
		if cerr := schedule.Sleep(ctx, endPause); cerr != nil {
			return err
		}
	}
}

// ended waits until no host peer answers, and returns an error if one still does. The Task
// Scheduler ends the process that it started, conhost, and need not end what runs in it.
func (l Logon) ended(ctx context.Context) error {
	for deadline := time.Now().Add(endTimeout); l.Answers != nil && l.Answers(ctx); {
		if time.Now().After(deadline) {
			return errors.New("a host peer still runs: end fairlead.exe in the Task Manager")
		}
		if err := schedule.Sleep(ctx, endPause); err != nil {
			return err
		}
	}
	return nil
}

// Running reports whether what is installed runs already, so that Install replaces it.
func Running(ctx context.Context, s System, l Logon) bool {
	switch l.OS {
	case "windows": // whether a task runs is told in the language of the user only
		return s.Run(ctx, "schtasks.exe", "/Query", "/TN", taskName) == nil
	case "darwin":
		return s.Run(ctx, "launchctl", "print", "gui/"+l.User+"/"+label) == nil
	case "linux":
		return s.Run(ctx, "systemctl", "--user", "is-active", "--quiet", unitName) == nil
	}
	return false
}

// Uninstall stops the host peer and undoes Install. It returns whether anything was
// installed.
func Uninstall(ctx context.Context, s System, l Logon) (bool, error) {
	switch l.OS {
	case "windows":
		there := s.Run(ctx, "schtasks.exe", "/Query", "/TN", taskName) == nil
		if !there {
			return false, nil
		}
		_ = s.Run(ctx, "schtasks.exe", "/End", "/TN", taskName) // it may not be running
		// Its trigger would start it again within the time that ended waits.
		if err := s.Run(ctx, "schtasks.exe", "/Delete", "/F", "/TN", taskName); err != nil {
			return true, wrap("uninstall", err)
		}
		if err := l.ended(ctx); err != nil {
			return true, fmt.Errorf("uninstall: the task is removed, but %w", err)
		}
		return true, nil
	case "darwin":
		_ = s.Run(ctx, "launchctl", "bootout", "gui/"+l.User+"/"+label) // it may not be running
		return removed(s.Remove(l.plistPath()))
	case "linux":
		// The name may also be that of a package's unit, which stays as it is.
		err := l.ours(s)
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("uninstall: %w, and stays: `systemctl --user disable --now fairlead-host` stops it", err)
		}
		stopped := s.Run(ctx, "systemctl", "--user", "disable", "--now", unitName)
		found, err := removed(s.Remove(l.unitPath()))
		if !found || err != nil {
			return found, err
		}
		if stopped == nil {
			return true, wrap("uninstall", s.Run(ctx, "systemctl", "--user", "daemon-reload"))
		}
		if _, err := removed(s.Remove(l.wantPath())); err != nil {
			return true, err
		}
		return true, fmt.Errorf("uninstall: %w; %s was removed, but a host peer that runs goes on: without a user bus, log in as this user "+
			"(su and sudo start none), then run `systemctl --user stop %s`", stopped, l.unitPath(), unitName)
	}
	return false, fmt.Errorf("uninstall: %s is not known here", l.OS)
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// removed returns whether a file was there, given the result of removing it.
func removed(err error) (bool, error) {
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return true, wrap("uninstall", err)
}

const (
	taskName = "fairlead host"
	label    = "dev.fairlead.host"
	unitName = "fairlead-host.service"
)

// PackagedUnit is the user unit of packages, on Linux.
const PackagedUnit = "/usr/lib/systemd/user/" + unitName

// task returns the task's definition. conhost --headless runs a console program without a
// window, and ends with 0 however that ended, so RestartOnFailure would see no failure.
// Instead the task is to be started each minute, which is ignored while it runs, and while
// its user is not logged on.
func (l Logon) task() string {
	words := []string{"--headless", windowsQuote(l.Program)}
	for _, a := range l.Args {
		words = append(words, windowsQuote(a))
	}
	return fmt.Sprintf(`<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo>
    <Description>Opens on this machine the ports that Linux guests publish.</Description>
  </RegistrationInfo>
  <Triggers>
    <LogonTrigger>
      <Enabled>true</Enabled>
      <UserId>%[1]s</UserId>
    </LogonTrigger>
    <TimeTrigger>
      <Repetition>
        <Interval>PT1M</Interval>
        <StopAtDurationEnd>false</StopAtDurationEnd>
      </Repetition>
      <StartBoundary>2000-01-01T00:00:00</StartBoundary>
      <Enabled>true</Enabled>
    </TimeTrigger>
  </Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>%[1]s</UserId>
      <LogonType>InteractiveToken</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <StartWhenAvailable>true</StartWhenAvailable>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Priority>5</Priority>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>%%SystemRoot%%\System32\conhost.exe</Command>
      <Arguments>%[2]s</Arguments>
    </Exec>
  </Actions>
</Task>
`, escape(l.User), escape(strings.Join(words, " ")))
}

// windowsQuote quotes one argument as CommandLineToArgvW reads it.
func windowsQuote(s string) string {
	if s != "" && !strings.ContainsAny(s, " \t\"") {
		return s
	}
	var b strings.Builder
	b.WriteByte('"')
	slashes := 0
	for i := range len(s) {
		switch s[i] {
		case '\\':
			slashes++
		case '"':
			b.WriteString(strings.Repeat(`\`, slashes+1)) // doubled, and one for the quote
			slashes = 0
		default:
			slashes = 0
		}
		b.WriteByte(s[i])
	}
	b.WriteString(strings.Repeat(`\`, slashes))
	b.WriteByte('"')
	return b.String()
}

func (l Logon) plistPath() string {
	return path.Join(l.Home, "Library/LaunchAgents", label+".plist")
}

// plist returns the launch agent.
func (l Logon) plist() string {
	var args strings.Builder
	for _, a := range append([]string{l.Program}, l.Args...) {
		fmt.Fprintf(&args, "    <string>%s</string>\n", escape(a))
	}
	return fmt.Sprintf(`<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0">
<dict>
  <key>Label</key>
  <string>%s</string>
  <key>ProgramArguments</key>
  <array>
%s  </array>
  <key>RunAtLoad</key>
  <true/>
  <key>KeepAlive</key>
  <dict>
    <key>SuccessfulExit</key>
    <false/>
  </dict>
  <key>SoftResourceLimits</key>
  <dict>
    <key>NumberOfFiles</key>
    <integer>65536</integer>
  </dict>
</dict>
</plist>
`, label, args.String())
}

func (l Logon) unitPath() string { return path.Join(l.Home, ".config/systemd/user", unitName) }

// wantPath is the link by which the unit starts at logon, which systemctl makes and removes.
func (l Logon) wantPath() string {
	return path.Join(l.Home, ".config/systemd/user/default.target.wants", unitName)
}

// unitMarker is the first line of the unit.
const unitMarker = "# Written by `fairlead host install`; `fairlead host uninstall` removes it."

// ours returns an error about a unit that Install did not write, as `systemctl --user edit
// --full` makes one; fs.ErrNotExist if there is none.
func (l Logon) ours(s System) error {
	b, err := s.ReadFile(l.unitPath())
	if err == nil && !bytes.Contains(b, []byte(unitMarker)) {
		err = fmt.Errorf("%s was not written by `fairlead host install`", l.unitPath())
	}
	return err
}

// unit returns the user unit: that of packages, with this program and its flags.
func (l Logon) unit() string {
	words := make([]string, 0, len(l.Args)+1)
	for _, a := range append([]string{l.Program}, l.Args...) {
		words = append(words, deploy.SystemdQuote(a))
	}
	env := ""
	for _, v := range l.Env {
		env += "Environment=" + strings.ReplaceAll(deploy.SystemdQuote(v), "$$", "$") + "\n" // where $ means itself
	}
	_, unit, _ := strings.Cut(deploy.HostUnit, "\n[Unit]\n") // without the comment about packages
	return unitMarker + "\n[Unit]\n" + strings.Replace(unit, "ExecStart="+deploy.Program+" host\n", env+"ExecStart="+strings.Join(words, " ")+"\n", 1)
}

func escape(s string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(s)) // a buffer does not fail
	return b.String()
}

// toUTF16 returns what the Task Scheduler reads: little endian, with a mark.
func toUTF16(s string) []byte {
	b := []byte{0xff, 0xfe}
	for _, u := range utf16.Encode([]rune(strings.ReplaceAll(s, "\n", "\r\n"))) {
		b = append(b, byte(u), byte(u>>8))
	}
	return b
}

// Machine is the System that this process runs on.
type Machine struct{}

// Run implements System.
func (Machine) Run(ctx context.Context, name string, args ...string) error {
	program, err := trust.Find(name)
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
	if err == nil {
		return nil
	}
	command := strings.Join(append([]string{name}, args...), " ")
	if out = bytes.TrimSpace(out[:min(len(out), 512)]); len(out) > 0 {
		return fmt.Errorf("%s: %w: %q", command, err, out)
	}
	return fmt.Errorf("%s: %w, without a message", command, err)
}

// WriteFile implements System.
func (Machine) WriteFile(name string, data []byte) error {
	if i := strings.LastIndexAny(name, `/\`); i > 0 {
		if err := os.MkdirAll(name[:i], 0o755); err != nil {
			return err
		}
	}
	return os.WriteFile(name, data, 0o600)
}

// Remove implements System.
func (Machine) Remove(name string) error { return os.Remove(name) }

// ReadFile implements System.
func (Machine) ReadFile(name string) ([]byte, error) { return os.ReadFile(name) }
