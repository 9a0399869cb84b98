// SPDX-License-Identifier: Apache-2.0

//go:build linux

package deploy

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// script runs a script of a package on a machine that systemd runs, where each systemctl
// command that begins with fails fails. It returns its output.
func script(t *testing.T, root, name, fails string, args ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("packages", name))
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(root, "bin")
	for _, dir := range []string{bin, filepath.Join(root, "run/systemd/system")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	fake := "#!/bin/sh\necho \"systemctl $*\"\ncase \"$*\" in '" + fails + "'*) exit 1;; esac\n"
	if err := os.WriteFile(filepath.Join(bin, "systemctl"), []byte(fake), 0o755); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	text := string(b)
	for _, dir := range []string{"/run/", "/etc/", "/usr/local/", "/var/"} {
		text = strings.ReplaceAll(text, " "+dir, " "+root+dir)
		text = strings.ReplaceAll(text, "="+dir, "="+root+dir)
	}
	text = strings.ReplaceAll(text, "\t/usr/bin/", "\t"+root+"/usr/bin/")
	cmd := exec.Command("sh", append([]string{"-c", text, name}, args...)...)
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// An agent that does not start, as with a mistake in agent.yaml, does not leave the package
// half installed, which would stop apt altogether.
func TestPackageIsInstalledWhereTheAgentFails(t *testing.T) {
	for _, tt := range []struct{ name, args string }{
		{"deb/postinstall.sh", "configure 0.1.0"}, {"rpm/postinstall.sh", "2"},
	} {
		out := script(t, t.TempDir(), tt.name, "try-restart", strings.Fields(tt.args)...)
		for _, want := range []string{"systemctl try-restart fairlead-agent.service\n", "`journalctl -u fairlead-agent`"} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: %q, want %q", tt.name, out, want)
			}
		}
		if out := script(t, t.TempDir(), tt.name, "none", strings.Fields(tt.args)...); strings.Contains(out, "journalctl") {
			t.Errorf("%s: %q", tt.name, out)
		}
	}
	for _, name := range []string{"deb/postinstall.sh", "deb/postremove.sh"} {
		script(t, t.TempDir(), name, "daemon-reload", "configure")
	}
	script(t, t.TempDir(), "rpm/postinstall.sh", "daemon-reload", "1")
}

// Where systemd does not run, as in WSL, `agent install` has a package's program started. The
// boot command would go on starting it after it has gone.
func TestPackageRemovesTheBootCommand(t *testing.T) {
	const boot, service = "etc/wsl.conf", "etc/init.d/fairlead-agent"
	for _, tt := range []struct {
		file, text string
		removes    bool
	}{
		{boot, "# Written by\n[boot]\ncommand = /usr/bin/fairlead agent --sink=auto </dev/null &\n", true},
		{boot, "[boot]\ncommand = /usr/local/bin/fairlead agent </dev/null &\n", false},
		{boot, "[boot]\n", false},
		{service, "#!/sbin/openrc-run\ncommand='/usr/bin/fairlead'\n", true},
		{service, "#!/sbin/openrc-run\ncommand=/usr/local/bin/fairlead\n", false},
		{"etc/other", "", false},
	} {
		for _, call := range []struct {
			script, arg string
			removal     bool // not an upgrade
		}{
			{"deb/preremove.sh", "remove", true},
			{"deb/preremove.sh", "upgrade", false},
			{"rpm/preremove.sh", "0", true},
			{"rpm/preremove.sh", "1", false},
			{"apk/preremove.sh", "1.2.3", tt.file != service}, // that is its own
		} {
			root := t.TempDir()
			for path, text := range map[string]string{tt.file: tt.text, "usr/bin/fairlead": "#!/bin/sh\necho \"fairlead $*\"\n"} {
				path = filepath.Join(root, path)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)); err != nil { //nolint:gosec // as there
					t.Fatal(err)
				}
			}
			out := script(t, root, call.script, "none", call.arg)
			if want := tt.removes && call.removal; strings.Contains(out, "fairlead agent uninstall\n") != want {
				t.Errorf("%s %s with %q: %q; want it uninstalled: %v", call.script, call.arg, tt.text, out, want)
			}
		}
	}
}

// What an archive left is before what the package has: in /etc/systemd, and in the PATH.
func TestPackageNamesWhatAnArchiveLeft(t *testing.T) {
	const unit, program = "etc/systemd/system/fairlead-agent.service", "usr/local/bin/fairlead"
	ours := "# Written by `fairlead agent install`; `fairlead agent uninstall` removes it.\n"
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  []string // in the output
	}{
		{"nothing", nil, nil},
		{"an archive", map[string]string{unit: ours, program: ""}, []string{"`fairlead agent uninstall`", "`systemctl enable --now fairlead-agent`", "/usr/local/bin/fairlead"}},
		{"the program alone", map[string]string{program: ""}, []string{"/usr/local/bin/fairlead"}},
		{"a unit of the administrator", map[string]string{unit: "[Service]\n"}, nil},
	} {
		for name, args := range map[string][]string{"deb/postinstall.sh": {"configure", ""}, "rpm/postinstall.sh": {"1"}} {
			root := t.TempDir()
			for path, text := range tt.files {
				path = filepath.Join(root, path)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil { //nolint:gosec // as there
					t.Fatal(err)
				}
			}
			out := script(t, root, name, "none", args...)
			for _, want := range tt.want {
				if !strings.Contains(out, want) {
					t.Errorf("%s with %s: %q, want %q", name, tt.name, out, want)
				}
			}
			if strings.Contains(out, "fairlead:") != (len(tt.want) > 0) {
				t.Errorf("%s with %s: %q", name, tt.name, out)
			}
		}
	}
}

// The package of fairlead-run starts nothing, and ends its service where it is removed.
func TestRunPackage(t *testing.T) {
	for _, tt := range []struct{ script, args, want, never string }{
		{"run/postinstall.sh", "configure", "try-restart fairlead-run.service", "enable"},
		{"run/preremove.sh", "remove", "disable --now fairlead-run.service", ""},
		{"run/preremove.sh", "0", "disable --now fairlead-run.service", ""},
		{"run/preremove.sh", "upgrade 0.2.0", "", "systemctl"},
		{"run/preremove.sh", "1", "", "systemctl"},
		{"run/postremove.sh", "remove", "daemon-reload", ""},
	} {
		out := script(t, t.TempDir(), tt.script, "none", strings.Fields(tt.args)...)
		if !strings.Contains(out, tt.want) || tt.never != "" && strings.Contains(out, tt.never) {
			t.Errorf("%s %s: %q", tt.script, tt.args, out)
		}
	}
	out := script(t, t.TempDir(), "run/postinstall.sh", "try-restart", "configure")
	if !strings.Contains(out, "`journalctl -u fairlead-run`") {
		t.Errorf("a service that does not start: %q", out)
	}
}
