// SPDX-License-Identifier: Apache-2.0

//go:build linux && boot

package install

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// packagesVariable is the directory of the packages under test. It has directories old
// and new, of two versions.
const packagesVariable = "FAIRLEAD_PACKAGES"

const (
	oldVersion = "v0.1.0"
	newVersion = "v0.1.1"
)

// built returns the one file of a version that matches.
func built(t *testing.T, version, pattern string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(os.Getenv(packagesVariable), version, pattern))
	if err != nil || len(files) != 1 {
		t.Fatalf("%s of version %s: %q, %v", pattern, version, files, err)
	}
	return files[0]
}

// sh runs a script of the shell and returns its output without space at the end.
func sh(t *testing.T, script string) string {
	t.Helper()
	out, err := try(script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func try(script string) (string, error) {
	out, err := exec.Command("sh", "-ec", script).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w:\n%s", script, err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// refused runs a script that must fail, with a word in its output.
func refused(t *testing.T, script, want string) {
	t.Helper()
	if out, err := try(script); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%s: %v, %q: want a failure with %q", script, err, out, want)
	}
}

// step runs a part of a test, without which the next ones make no sense.
func step(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	if !t.Run(name, f) {
		t.FailNow()
	}
}

// volatile are directories whose files come and go by themselves, and that of the tests.
var volatile = []string{"/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp", "/test", "/home", "/root", "/var/log", "/var/lib/systemd"}

// backup are files that dpkg makes of its own.
var backup = []string{"/var/lib/dpkg/status-old", "/var/lib/dpkg/diversions-old", "/var/lib/dpkg/statoverride-old"}

// listFiles returns the names of all files of the machine.
func listFiles(t *testing.T) map[string]bool {
	t.Helper()
	found := make(map[string]bool)
	err := filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if slices.Contains(volatile, path) {
			return fs.SkipDir
		}
		if !slices.Contains(backup, path) {
			found[path] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// wantFiles compares the files of the machine with those of before. What is below one of
// the allowed paths may have come.
func wantFiles(t *testing.T, before map[string]bool, allowed ...string) {
	t.Helper()
	after := listFiles(t)
	for _, path := range slices.Sorted(maps.Keys(after)) {
		kept := slices.ContainsFunc(allowed, func(a string) bool { return path == a || strings.HasPrefix(path, a+"/") })
		if !before[path] && !kept {
			t.Errorf("left behind: %s", path)
		}
	}
	for _, path := range slices.Sorted(maps.Keys(before)) {
		if !after[path] {
			t.Errorf("removed: %s", path)
		}
	}
}

// row is a port as `fairlead ls -o json` lists it.
type row struct {
	Port  int    `json:"port"`
	State string `json:"state"`
}

// waitForPort waits until a command that lists ports has one in a state.
func waitForPort(t *testing.T, ls string, number int, state string) {
	t.Helper()
	wait.Until(t, fmt.Sprintf("port %d is %s", number, state), func() error {
		out, err := try(ls + " -o json")
		if err != nil {
			return err
		}
		var list struct {
			Publications []row `json:"publications"`
		}
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if !slices.Contains(list.Publications, row{number, state}) {
			return errors.New(out)
		}
		return nil
	})
}

// wantDoctor waits until the doctor, which command runs, finds no failures but some.
func wantDoctor(t *testing.T, command string, failures ...string) {
	t.Helper()
	wait.Until(t, "the doctor is content", func() error {
		out, err := exec.Command("sh", "-ec", command).CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			return err
		}
		for line := range strings.Lines(string(out)) {
			allowed := slices.ContainsFunc(failures, func(f string) bool { return strings.HasPrefix(line, "FAIL  "+f+" ") })
			if strings.HasPrefix(line, "FAIL ") && !allowed || strings.Contains(line, " starting") {
				return errors.New(string(out))
			}
		}
		if !strings.Contains(string(out), "ok    agent running ") {
			return fmt.Errorf("no agent runs:\n%s", out)
		}
		t.Logf("%s", out)
		return nil
	})
}

// noHost is what the doctor complains about where no host is.
const noHost = "link host"

// serveEcho returns to each connection what it sends.
func serveEcho(t *testing.T, l net.Listener) {
	t.Helper()
	t.Cleanup(func() { _ = l.Close() })
	go echo.Serve(l)
}

// agentPID waits for the process that runs a program as agent, other than that of not.
func agentPID(t *testing.T, program string, not int) (pid int) {
	t.Helper()
	wait.Until(t, "an agent runs", func() error {
		processes, err := filepath.Glob("/proc/[0-9]*/exe")
		if err != nil {
			return err
		}
		for _, exe := range processes {
			path, _ := os.Readlink(exe) // it may have ended
			args, _ := os.ReadFile(filepath.Join(filepath.Dir(exe), "cmdline"))
			if path != program || !strings.HasPrefix(string(args), program+"\x00agent\x00") {
				continue
			}
			if _, err := fmt.Sscanf(exe, "/proc/%d/exe", &pid); err == nil && pid != not {
				return nil
			}
		}
		return errors.New("there is none")
	})
	return pid
}

// installArchive puts the program of a version's archive where it belongs.
func installArchive(t *testing.T, version string) {
	t.Helper()
	dir := t.TempDir()
	sh(t, fmt.Sprintf("tar -C %s --strip-components 1 -xzf %s", dir, built(t, version, "*.tar.gz")))
	sh(t, fmt.Sprintf("install -m 0755 %s/fairlead /usr/local/bin/", dir))
}

// wantVersion waits until the installed program and the agent that runs are of a version.
func wantVersion(t *testing.T, version string) {
	t.Helper()
	want := "fairlead " + version + "\nrunning agent " + version
	wait.Until(t, "version "+version+" runs", func() error {
		out, err := try("fairlead version")
		if err == nil && !strings.HasPrefix(out, want) {
			err = errors.New(out)
		}
		return err
	})
}
