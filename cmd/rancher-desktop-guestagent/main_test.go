// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const (
	launcher = "rancher-desktop-guestagent"
	target   = "fairlead"
	exitCode = 7 // of the fake fairlead
)

// TestMain makes copies of the test program act by their name: as the launcher, or as a
// fairlead that prints where it is and how it was started.
func TestMain(m *testing.M) {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	switch filepath.Base(self) {
	case launcher:
		main()
	case target:
		fmt.Printf("%s %q %s\n", self, os.Args, os.Getenv("MARK"))
		os.Exit(exitCode)
	}
	os.Exit(m.Run())
}

// install copies the test program to name.
func install(t *testing.T, name string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(self)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(name), 0o755)
	}
	if err == nil {
		err = os.WriteFile(name, b, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// start runs a launcher with flags as Rancher Desktop gives them.
func start(t *testing.T, program, path string) (out string, code int) {
	t.Helper()
	cmd := exec.Command(program, "-debug=false", "--docker")
	cmd.Env = []string{"PATH=" + path, "MARK=environment"}
	b, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(b), cmd.ProcessState.ExitCode()
}

// The launcher starts the fairlead beside it, or else that of PATH, under its own name, by
// which fairlead knows which flags these are, with arguments and environment unchanged.
func TestLauncherStartsFairlead(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	program := install(t, filepath.Join(dir, "a", launcher))
	inPath := install(t, filepath.Join(dir, "path", target))
	want := func(fairlead string) string {
		return fmt.Sprintf("%s %q environment\n", fairlead, []string{launcher, "-debug=false", "--docker"})
	}
	if out, code := start(t, program, filepath.Dir(inPath)); out != want(inPath) || code != exitCode {
		t.Errorf("in PATH: exit %d, %s, want %s", code, out, want(inPath))
	}
	beside := install(t, filepath.Join(dir, "a", target))
	if out, code := start(t, program, filepath.Dir(inPath)); out != want(beside) || code != exitCode {
		t.Errorf("beside it: exit %d, %s, want %s", code, out, want(beside))
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(program, link); err != nil {
		t.Fatal(err)
	}
	if out, code := start(t, link, "/nowhere"); out != want(beside) || code != exitCode {
		t.Errorf("by a link: exit %d, %s, want %s", code, out, want(beside))
	}
}

func TestLauncherWithoutFairlead(t *testing.T) {
	dir := t.TempDir()
	program := install(t, filepath.Join(dir, launcher))
	others := install(t, filepath.Join(dir, "path", target))
	for name, path := range map[string]string{"nothing in PATH": "/nowhere", "a program that others can change": filepath.Dir(others)} {
		if err := os.Chmod(others, 0o777); err != nil { //nolint:gosec // the test's matter
			t.Fatal(err)
		}
		out, code := start(t, program, path)
		if code != 1 || !strings.HasPrefix(out, launcher+": cannot start fairlead: ") || strings.Count(out, "\n") != 1 {
			t.Errorf("%s: exit %d, %s", name, code, out)
		}
	}
}
