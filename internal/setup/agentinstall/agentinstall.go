// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package agentinstall has the agent started with its machine, where no package did: by
// systemd, by OpenRC, or by the boot command of WSL.
package agentinstall

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/fairlead/fairlead/deploy"
	"github.com/fairlead/fairlead/internal/config/trust"
	"github.com/fairlead/fairlead/internal/guest/wsl"
)

// Init is what starts programs with a machine.
type Init string

// What the agent can be started by.
const (
	Systemd Init = "systemd"
	OpenRC  Init = "openrc"
	WSL     Init = "wsl"
)

// Options describe an installation.
type Options struct {
	Root    string   // directory that has the machine's files: "/"
	Init    Init     // found in Root if empty
	Program string   // absolute path of fairlead, outside of Root
	Args    []string // after it: "agent", flags
	// Run runs a command of the machine; its output is in the error.
	Run func(ctx context.Context, name string, args ...string) error
	// Control returns the path of the control socket of an agent with these flags. Nil is
	// for none: then no running agent is looked for.
	Control func(flags []string) string
}

// Removed is what Uninstall did.
type Removed struct {
	Found bool  // something was installed
	Ended int   // id of the process that WSL's boot command had started, and that was ended; or 0
	Runs  error // why the process still runs that WSL's boot command had started; nil if none does
}

// The files that an installation makes or changes, below Root.
const (
	service  = "fairlead-agent"
	unitFile = "etc/systemd/system/" + service + ".service"
	rcFile   = "etc/init.d/" + service
	wslFile  = "etc/wsl.conf"
)

// packaged are the files of packages.
var packaged = []string{"usr/lib/systemd/system/" + service + ".service", "lib/systemd/system/" + service + ".service"}

// marker is a line of all that Install writes, and Uninstall removes.
const marker = "# Written by `fairlead agent install`; `fairlead agent uninstall` removes it."

// Install starts the agent now and with the machine, with WSL only the latter. It replaces
// what an earlier Install made, and nothing else: it is an error if something else starts
// the agent. It returns the init.
func Install(ctx context.Context, o Options) (Init, error) {
	init, err := o.install(ctx)
	if err != nil {
		return init, fmt.Errorf("install: %w", err)
	}
	return init, nil
}

func (o Options) install(ctx context.Context) (Init, error) {
	init := o.Init
	if init == "" {
		init = Detect(o.Root)
	}
	if err := errors.Join(trusted(o.Program, deploy.Program), o.free(init)); err != nil {
		return init, err
	}
	for _, other := range []Init{Systemd, OpenRC, WSL} {
		if other == init {
			continue
		}
		gone, err := o.remove(ctx, other)
		if err == nil && gone.Runs != nil {
			err = fmt.Errorf("the agent that the boot command of WSL started still runs: %w: run `wsl --shutdown` in Windows, then `fairlead agent install` again", gone.Runs)
		}
		if err != nil {
			return init, err
		}
	}
	switch init {
	case Systemd:
		if err := o.write(unitFile, o.unit(), 0o644); err != nil {
			return init, err
		}
		err := o.all(ctx, []string{"systemctl", "daemon-reload"}, []string{"systemctl", "enable", service}, []string{"systemctl", "restart", service})
		return init, advise(err, unitFile, "`journalctl -u "+service+"`")
	case OpenRC:
		if err := o.write(rcFile, o.script(), 0o755); err != nil {
			return init, err
		}
		err := o.all(ctx, []string{"rc-update", "add", service, "default"}, []string{"rc-service", service, "restart"})
		return init, advise(err, rcFile, "/var/log/fairlead.log")
	case WSL:
		return init, o.boot()
	}
	return init, errors.New("neither systemd, OpenRC nor WSL is here: start `fairlead agent` with the machine by other means")
}

// advise adds to the error of an init's command which file was written, and how to go on.
func advise(err error, file, log string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w; /%s was written and stays: see %s, then run `fairlead agent install` again, or `fairlead agent uninstall` to remove it", err, file, log)
}

// Uninstall stops the agent and undoes Install. What the boot command of WSL started is
// ended by its control socket, as no init can stop it.
func Uninstall(ctx context.Context, o Options) (Removed, error) {
	var all Removed
	for _, init := range []Init{Systemd, OpenRC, WSL} {
		r, err := o.remove(ctx, init)
		if err != nil {
			return all, fmt.Errorf("uninstall: %w", err)
		}
		all.Found = all.Found || r.Found
		all.Ended, all.Runs = r.Ended, r.Runs // of WSL, which is the last
	}
	return all, nil
}

// remove undoes an installation for one init, if there is one. Errors of the init's
// commands count only if it runs.
func (o Options) remove(ctx context.Context, init Init) (Removed, error) {
	name := map[Init]string{Systemd: unitFile, OpenRC: rcFile, WSL: wslFile}[init]
	text, err := o.read(name)
	if err != nil || !strings.Contains(text, marker) {
		return Removed{}, err
	}
	found := Removed{Found: true}
	run := o.Run
	if init != Detect(o.Root) {
		run = func(ctx context.Context, name string, args ...string) error {
			_ = o.Run(ctx, name, args...)
			return ctx.Err()
		}
	}
	switch init {
	case Systemd:
		if err := run(ctx, "systemctl", "disable", "--now", service); err != nil {
			return found, err
		}
		if err := os.Remove(o.path(name)); err != nil {
			return found, err
		}
		return found, run(ctx, "systemctl", "daemon-reload")
	case OpenRC:
		_ = run(ctx, "rc-update", "delete", service, "default") // it may have been deleted by hand
		if err := run(ctx, "rc-service", "--ifstarted", service, "stop"); err != nil {
			return found, err
		}
		return found, os.Remove(o.path(name))
	default:
		return o.unboot(ctx, text)
	}
}

// Detect returns what starts programs with the machine whose files are in root, empty if
// that is none of those above.
func Detect(root string) Init {
	switch {
	case isDir(filepath.Join(root, "run/systemd/system")): // sd_booted(3)
		return Systemd
	case isDir(filepath.Join(root, "run/openrc")):
		return OpenRC
	}
	if wsl.Here(root) {
		return WSL
	}
	return ""
}

func isDir(name string) bool {
	fi, err := os.Stat(name)
	return err == nil && fi.IsDir()
}

// free returns an error if something that Install did not make starts the agent by init.
// What another init would read starts nothing here.
func (o Options) free(init Init) error {
	switch init {
	case Systemd:
		for _, name := range packaged {
			if _, err := os.Stat(o.path(name)); err != nil {
				continue
			}
			first := ""
			if text, err := o.read(wslFile); err == nil && strings.Contains(text, marker) {
				first = "`fairlead agent uninstall`, then "
			}
			return fmt.Errorf("/%s belongs to a package: run %s`systemctl enable --now %s` instead", name, first, service)
		}
		return o.ours(unitFile)
	case OpenRC:
		return o.ours(rcFile)
	}
	return nil
}

// ours returns an error if there is a file or link that Install did not make.
func (o Options) ours(name string) error {
	_, err := os.Lstat(o.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	text, readErr := o.read(name)
	if err = errors.Join(err, readErr); err != nil || strings.Contains(text, marker) {
		return err
	}
	// systemd takes an empty unit, or a link to /dev/null, for a mask.
	if fi, err := os.Stat(o.path(name)); name == unitFile && err == nil && fi.Size() == 0 {
		return fmt.Errorf("/%s masks the agent: run `systemctl unmask %s` first", name, service)
	}
	return fmt.Errorf("/%s is there and was not written by this command: remove it first, or enable it", name)
}

// trusted returns an error if a user other than root can replace program, which root will
// run. The error has the command that mends it: where program is not at final, its usual
// place, also the one that installs it there.
func trusted(program, final string) error {
	err := trust.Program(program)
	if !errors.Is(err, trust.ErrUntrusted) {
		return err
	}
	if sameFile(program, final) {
		return fmt.Errorf("users other than root can change %s: %w", program, err)
	}
	return fmt.Errorf("users other than root can change %s: run `install -m 0755 %s %s`, then `%s agent install`: %w", program, program, final, final, err)
}

func sameFile(a, b string) bool {
	x, errX := os.Stat(a)
	y, errY := os.Stat(b)
	return errX == nil && errY == nil && os.SameFile(x, y)
}

func (o Options) path(name string) string { return filepath.Join(o.Root, name) }

// read returns the text of a file, which is empty if there is none.
func (o Options) read(name string) (string, error) {
	b, err := os.ReadFile(o.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(b), err
}

// write makes or replaces a file.
func (o Options) write(name, text string, mode fs.FileMode) error {
	path := o.path(name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	return trust.Place(f, []byte(text), path, os.Rename)
}

// all runs commands until one fails.
func (o Options) all(ctx context.Context, commands ...[]string) error {
	for _, c := range commands {
		if err := o.Run(ctx, c[0], c[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// unit returns the unit of systemd.
func (o Options) unit() string {
	words := []string{deploy.SystemdQuote(o.Program)}
	for _, a := range o.Args {
		words = append(words, deploy.SystemdQuote(a))
	}
	return marked(strings.Replace(deploy.AgentUnit, "ExecStart="+deploy.Program+" agent", "ExecStart="+strings.Join(words, " "), 1))
}

// script returns the script of OpenRC, which is read by a shell: command_args twice.
func (o Options) script() string {
	words := make([]string, len(o.Args))
	for i, a := range o.Args {
		words[i] = shellQuote(a)
	}
	twice := strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `\$`, "`", "\\`").Replace(strings.Join(words, " "))
	return marked(strings.NewReplacer(
		"command="+deploy.Program+"\n", "command="+shellQuote(o.Program)+"\n",
		`command_args="agent `, `command_args="`+twice+" ",
	).Replace(deploy.AgentScript))
}

// marked returns text with the marker as its first line, or after that with the shell.
func marked(text string) string {
	first, rest, _ := strings.Cut(text, "\n")
	if strings.HasPrefix(first, "#!") {
		return first + "\n" + marker + "\n" + rest
	}
	return marker + "\n" + text
}

// shellQuote makes s one word for a shell.
func shellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
