// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	gocmp "github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/output"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// fits checks that an output fits 80 columns. A word may be longer.
func fits(t *testing.T, output string) {
	t.Helper()
	for line := range strings.Lines(output) {
		words := strings.Fields(line)
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 && utf8.RuneCountInString(words[len(words)-1]) < 40 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

func TestDoctorFitsTheTerminal(t *testing.T) {
	r := newRig(t).start()
	r.guest.listen(t, "tcp4", "0.0.0.0:8080")
	r.wantState("tcp 0.0.0.0:8080", "active")
	var out string
	r.eventually("doctor finds no failure", func() error {
		if out = r.typed("fairlead doctor", r.agentCtl, 0); strings.Contains(out, "(exit status") {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	fits(t, out)
}

// terminal runs a command in a terminal of 80 columns, and returns what that shows.
func (s *space) terminal(t *testing.T, cmd *exec.Cmd) (*process, *output.Buffer) {
	t.Helper()
	pty, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	fd := int(pty.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}); err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = tty, tty
	p := s.startCmd(t, filepath.Base(cmd.Path), cmd)
	_ = tty.Close()
	screen := new(output.Buffer)
	go func() {
		_, _ = io.Copy(screen, pty) // fails when the last process has closed the terminal
		_ = pty.Close()
	}()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the terminal shows:\n%s", screen.String())
		}
	})
	return p, screen
}

// The demo fits a terminal of 80 columns, and shows what testdata/demo.txt has.
func TestDemoFitsTheTerminal(t *testing.T) {
	outside := newSpace(t)
	tmp, err := os.MkdirTemp("/tmp", "fl") // short: sockets are in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(tmp) })
	cmd := exec.Command(binary, "demo")
	cmd.Dir = filepath.Dir(filepath.Dir(binary)) // so the program is at DIRECTORY/fairlead
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
	p, shown := outside.terminal(t, cmd)
	var screen string
	wait.Until(t, "both ports are reachable", func() error {
		screens := strings.Split(strings.ReplaceAll(shown.String(), "\r\n", "\n"), "\x1b[H\x1b[2J")
		screen, _, _ = strings.Cut(screens[len(screens)-1], "\nlatest:")
		if strings.Count(screen, "active") != 2 || strings.Count(screen, "fairlead (") != 2 {
			return fmt.Errorf("the screen shows\n%s", screen)
		}
		return nil
	})
	screen = usualPaths(screen, tmp)
	fits(t, screen)
	screen = regexp.MustCompile(`fairlead-demo-\d+`).ReplaceAllString(screen, "fairlead-demo-811")
	screen = regexp.MustCompile(`fairlead \(\d+\)  `).ReplaceAllStringFunc(screen, func(s string) string { return fmt.Sprintf("%-*s", len(s), "fairlead (811)") })
	screen = strings.TrimRight(same(screen, tmp), "\n") + "\n"
	const golden = "testdata/demo.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(screen), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil || alike(screen) != alike(string(want)) {
		t.Errorf("%s (-) differs from the screen (+): go -C test test -tags root ./e2e -run DemoFits -update: %v\n%s",
			golden, err, gocmp.Diff(strings.Split(alike(string(want)), "\n"), strings.Split(alike(screen), "\n")))
	}
	for port := 9000; port < 9003; port++ { // so that there are more events than rows for them
		demoGuest(t, shown.String()).listen(t, "tcp4", fmt.Sprintf("0.0.0.0:%d", port))
	}
	wait.Until(t, "the whole screen fits, with the latest event", func() error {
		screens := strings.Split(strings.ReplaceAll(shown.String(), "\r\n", "\n"), "\x1b[H\x1b[2J")
		lines := strings.Split(usualPaths(screens[len(screens)-1], tmp), "\n")
		for _, line := range lines {
			if n := utf8.RuneCountInString(line); n > 80 {
				t.Fatalf("%d columns: %s", n, line)
			}
		}
		_, latest, _ := strings.Cut(strings.Join(lines, "\n"), "\nlatest:\n")
		if len(lines) > 24 || !regexp.MustCompile(`900\d/tcp .* active +on `).MatchString(latest) {
			return fmt.Errorf("%d lines:\n%s", len(lines), strings.Join(lines, "\n"))
		}
		return nil
	})
	if code := p.Stop(syscall.SIGINT); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// usualPaths replaces where this test has the program and temporary files.
func usualPaths(screen, tmp string) string {
	return strings.NewReplacer(filepath.Base(filepath.Dir(binary))+"/fairlead", "bin/fairlead", tmp, "/tmp").Replace(screen)
}

// demoGuest opens the guest of a demo.
func demoGuest(t *testing.T, shown string) *space {
	t.Helper()
	name := regexp.MustCompile(`namespace (fairlead-demo-\d+)`).FindStringSubmatch(shown)
	if name == nil {
		t.Fatalf("no namespace in %q", shown)
	}
	ns, err := netns.Open("/run/netns/" + name[1])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	return &space{ns}
}
