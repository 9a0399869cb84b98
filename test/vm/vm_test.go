// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestArchive compares the bytes of a small archive with the format's description.
func TestArchive(t *testing.T) {
	var b bytes.Buffer
	a := archive{w: &b}
	if err := a.entry("f", modeFile|0o644, 3, strings.NewReader("abc")); err != nil {
		t.Fatal(err)
	}
	if err := a.end(); err != nil {
		t.Fatal(err)
	}
	want := "070701" + "00000001" + "000081A4" + strings.Repeat("00000000", 2) + "00000001" + "00000000" + "00000003" +
		strings.Repeat("00000000", 4) + "00000002" + "00000000" + "f\x00" + "abc\x00" +
		"070701" + "00000002" + strings.Repeat("00000000", 3) + "00000001" + strings.Repeat("00000000", 6) +
		"0000000B" + "00000000" + "TRAILER!!!\x00" + "\x00\x00\x00"
	want += strings.Repeat("\x00", 512-len(want))
	if b.String() != want {
		t.Errorf("got  %q\nwant %q", b.String(), want)
	}
}

func TestArchiveTree(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "d"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "d/f"), []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("f", filepath.Join(root, "d/l")); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	a := archive{w: &b}
	if err := a.tree(root, root); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"000041C0", "d/f\x00", "00008180", "text", "d/l\x00", "0000A1FF"} {
		if !bytes.Contains(b.Bytes(), []byte(want)) {
			t.Errorf("no %q in %q", want, b.String())
		}
	}
	if b.Len()%4 != 0 {
		t.Errorf("length %d is not aligned", b.Len())
	}
}

func TestClosure(t *testing.T) {
	file := filepath.Join(t.TempDir(), "modules.dep")
	text := "kernel/a-b.ko.xz: kernel/c.ko.xz kernel/d.ko.xz\nkernel/c.ko.xz:\nkernel/d.ko.xz: kernel/c.ko.xz\nkernel/e.ko.xz:\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	deps, err := readDeps(file)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"kernel/a-b.ko.xz", "kernel/c.ko.xz", "kernel/d.ko.xz"}
	if got := closure(deps, []string{"a_b", "d", "builtin"}); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestScript runs the generated script with a shell.
func TestScript(t *testing.T) {
	dir := t.TempDir()
	program := "#!/bin/sh\necho \"$X|$Y|$FAIRLEAD_KERNEL|$1\"\nexit 3\n"
	if err := os.WriteFile(filepath.Join(dir, "run.test"), []byte(program), 0o700); err != nil {
		t.Fatal(err)
	}
	text := script(kernel{release: "6.1-x"}, []job{
		{dir: dir, args: []string{"it's $HOME"}, env: []string{"X=a b", "Y=c=d"}},
		{dir: filepath.Join(dir, "absent")},
	})
	sh := exec.Command("sh")
	sh.Stdin = bytes.NewReader(text)
	out, err := sh.Output()
	if err != nil {
		t.Fatal(err)
	}
	want := "\n\x1ebegin 0\na b|c=d|6.1-x|it's $HOME\n\n\x1eend 0 3\n\n\x1ebegin 1\n"
	if !strings.HasPrefix(string(out), want) {
		t.Errorf("got %q, want %q...", out, want)
	}
}

func TestConsole(t *testing.T) {
	for _, tt := range []struct {
		line string
		bad  bool
	}{
		{"[    1.0] BUG: kernel NULL pointer dereference, address: 0000000000000000", true},
		{"[    1.0] watchdog: BUG: soft lockup - CPU#0 stuck for 22s!", true},
		{"[    1.0] Oops: 0000 [#1] PREEMPT SMP NOPTI", true},
		{"[    1.0] kernel BUG at net/core/dev.c:1!", true},
		{"[    1.0] WARNING: CPU: 0 PID: 1 at kernel/trace/ftrace.c:1 f+0x1/0x2", true},
		{"[    1.0] Kernel panic - not syncing: Attempted to kill init!", true},
		{"[    1.0] Call Trace:", true},
		{"[    1.0] unregister_netdevice: waiting for lo to become free. Usage count = 2", true},
		{"[    1.0] run.test[9]: segfault at 0 ip 0 sp 0 error 4", true},
		{"[    1.0] Out of memory: Killed process 1", true},
		{"[    1.0] INFO: task x:1 blocked for more than 120 seconds.", true},
		{"[    1.0] mtrr: your CPUs had inconsistent MTRRdefType settings", false},
		{"[    1.0] reboot: Power down", false},
		{"[    1.0] DEBUG: nothing", false},
	} {
		var c console
		c.read(strings.NewReader(tt.line + "\r\nafter\r\n"))
		err := c.err()
		if bad := err != nil; bad != tt.bad {
			t.Errorf("%q: error %v", tt.line, err)
		}
		if err != nil && !strings.Contains(err.Error(), "console: after\n") {
			t.Errorf("%q: error %v lacks what followed", tt.line, err)
		}
		if last := c.last(); !strings.HasSuffix(last, "console: after\n") {
			t.Errorf("%q: last lines %q", tt.line, last)
		}
	}
}

func TestConsoleIsBounded(t *testing.T) {
	for line, want := range map[string]int{"Call Trace:\n": consoleShown, "all is well\n": consoleTail} {
		var live bytes.Buffer
		c := console{live: &live}
		c.read(strings.NewReader(strings.Repeat(line, 10*consoleShown)))
		if n := len(c.lines); n != want {
			t.Errorf("%q: kept %d lines, want %d", line, n, want)
		}
		if n := strings.Count(live.String(), "console: "); n != 10*consoleShown {
			t.Errorf("%q: showed %d lines", line, n)
		}
	}
}

// TestFindSuites finds what a tag adds, and only that.
func TestFindSuites(t *testing.T) {
	t.Chdir("../..")
	suites, err := findSuites(t.Context(), "amd64", "vm", "", []string{"./test/vm/..."})
	if err != nil {
		t.Fatal(err)
	}
	if len(suites) != 1 || !strings.HasSuffix(suites[0].Package, "/test/vm/selftest") || suites[0].Methods ||
		!slices.Contains(suites[0].Tests, "TestKernel") {
		t.Errorf("got %+v, want selftest alone", suites)
	}
}

// Patterns are those of the repository, in both of its modules.
func TestPatternsByModule(t *testing.T) {
	got := byModule([]string{"./...", "./internal/guest/agent", "./test/e2e"})
	want := map[string][]string{".": {"./...", "./internal/guest/agent"}, "test": {"./...", "./e2e"}}
	if !maps.EqualFunc(got, want, slices.Equal) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestFreshKernelTestsAreRunApart(t *testing.T) {
	t.Chdir("../..")
	suites, err := findSuites(t.Context(), "amd64", "vm", "", []string{"./test/nat"})
	if err != nil || len(suites) != 1 {
		t.Fatalf("%+v, %v", suites, err)
	}
	fresh, others := divide(append(suites[0].Tests, "TestOther"))
	if !slices.Equal(fresh, []string{"TestFreshKernelIsFollowedAfterModuleLoad"}) || !slices.Contains(others, "TestOther") {
		t.Errorf("fresh %q, others %q", fresh, others)
	}
}

// TestFindSuitesForASmokeTest leaves out what also runs outside, except what was chosen
// and what depends on the kernel.
func TestFindSuitesForASmokeTest(t *testing.T) {
	t.Chdir("../..")
	if _, err := findSuites(t.Context(), "amd64", "vm", "TestHTTP,TestAbsent", []string{"./test/e2e"}); err == nil {
		t.Error("a name that no test has is no error")
	}
	suites, err := findSuites(t.Context(), "amd64", "vm", "TestHTTP", []string{"./test/e2e", "./internal/...", "./test/vm/selftest"})
	if err != nil {
		t.Fatal(err)
	}
	tests := make(map[string][]string)
	for _, s := range suites {
		tests[strings.TrimPrefix(s.Package, "github.com/fairlead/fairlead/")] = s.Tests
	}
	e2e := tests["test/e2e"]
	if !slices.Contains(e2e, "TestHTTP") || slices.Contains(e2e, "TestUDP") || !slices.Contains(e2e, "TestVsock") {
		t.Errorf("of test/e2e: %q, want TestHTTP, what needs a machine, and nothing else", e2e)
	}
	if len(tests["test/vm/selftest"]) == 0 {
		t.Error("selftest is missing")
	}
	if !slices.Contains(tests["internal/guest/sink/listener/refused"], "TestRefusedBindIsReported") {
		t.Error("what depends on the kernel is missing")
	}
	methods := 0
	for _, s := range suites {
		if s.Methods {
			methods++
		}
	}
	if methods == 0 {
		t.Error("no package depends on the attach methods")
	}
}

// TestFindSuitesThatInstall finds which packages need the packages under test.
func TestFindSuitesThatInstall(t *testing.T) {
	t.Chdir("../..")
	suites, err := findSuites(t.Context(), "amd64", "boot", "", []string{"./test/install", "./test/e2e"})
	if err != nil {
		t.Fatal(err)
	}
	if len(suites) != 1 || !suites[0].Packages || suites[0].Binary || len(suites[0].Tests) == 0 {
		t.Errorf("got %+v, want test/install alone", suites)
	}
}

// TestFindSuitesThatBootMachines finds which packages boot machines within the machine.
func TestFindSuitesThatBootMachines(t *testing.T) {
	t.Chdir("../..")
	suites, err := findSuites(t.Context(), "amd64", "boot", "", []string{"./test/nested", "./test/install"})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range suites {
		if nested := strings.HasSuffix(s.Package, "/nested"); s.Nested != nested || nested && !s.Binary {
			t.Errorf("got %+v", s)
		}
	}
	if len(suites) != 2 {
		t.Errorf("got %d packages", len(suites))
	}
}

// TestNestedMachineIsPackedIfAsked packs kernel, initramfs and what was laid out for a machine
// within the machine, and nothing where nothing was.
func TestNestedMachineIsPackedIfAsked(t *testing.T) {
	dir := t.TempDir()
	root, base := filepath.Join(dir, "root"), filepath.Join(dir, "base")
	k := kernel{dir: dir}
	for name, text := range map[string]string{base: "an initramfs", filepath.Join(dir, "vmlinuz"): "a kernel"} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pack := func() string {
		t.Helper()
		var b bytes.Buffer
		a := archive{w: &b}
		if err := a.nested(root, k, base); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	if got := pack(); got != "" {
		t.Errorf("packed %q", got)
	}
	if err := os.MkdirAll(filepath.Join(root, "usr/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"usr/bin\x00", "boot/vmlinuz\x00", "a kernel", "boot/initrd\x00", "an initramfs"} {
		if got := pack(); !strings.Contains(got, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
	if err := stageNested(filepath.Join(dir, "other"), architectures()[1]); err == nil {
		t.Error("laid out for arm64, whose emulator has no virtualisation here")
	}
}

func TestWriteFileIsWholeOrAbsent(t *testing.T) {
	dir := t.TempDir()
	err := writeFile(filepath.Join(dir, "f"), func(w io.Writer) error {
		if _, err := w.Write([]byte("half")); err != nil {
			return err
		}
		return io.ErrUnexpectedEOF
	})
	if err == nil {
		t.Error("no error")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left %v, error %v", left, err)
	}
}
