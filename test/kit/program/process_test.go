// SPDX-License-Identifier: Apache-2.0

//go:build unix

package program

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// outer is a test as a program under test sees it.
type outer struct {
	testing.TB
	failed   bool
	cleanups []func()
	log      strings.Builder
}

func (o *outer) Helper()                   {}
func (o *outer) Failed() bool              { return o.failed }
func (o *outer) Cleanup(f func())          { o.cleanups = append(o.cleanups, f) }
func (o *outer) Logf(f string, a ...any)   { fmt.Fprintf(&o.log, f+"\n", a...) }
func (o *outer) Errorf(f string, a ...any) { o.failed = true; o.Logf(f, a...) }

func (o *outer) Fatalf(f string, a ...any) {
	o.Errorf(f, a...)
	panic(o)
}

func (o *outer) Fatal(a ...any) { o.Fatalf("%v", a...) }

// try calls f, which may end the outer test.
func (o *outer) try(f func()) {
	defer func() {
		if p := recover(); p != nil && p != o {
			panic(p)
		}
	}()
	f()
}

// end runs the cleanups and returns the log.
func (o *outer) end() string {
	for _, f := range slices.Backward(o.cleanups) {
		f()
	}
	return o.log.String()
}

func shell(script string) Command {
	return Command{Cmd: exec.Command("/bin/sh", "-c", script), Name: "script"}
}

// gone checks that the process was waited for.
func gone(t *testing.T, p *Process) {
	t.Helper()
	if err := syscall.Kill(p.PID(), 0); !errors.Is(err, syscall.ESRCH) || !p.Ended() {
		t.Errorf("the process is still there: %v", err)
	}
}

func TestOutputAndExit(t *testing.T) {
	long := strings.Repeat("x", 3<<20)
	for _, log := range []string{"", filepath.Join(t.TempDir(), "log")} {
		c := shell("echo one; echo two >&2; head -c " + fmt.Sprint(len(long)) + " /dev/zero | tr '\\0' x; exit 3")
		c.Log = log
		for range 2 { // a file has what the first one wrote as well
			c.Cmd = exec.Command(c.Cmd.Path, c.Cmd.Args[1:]...)
			p := Start(t, c)
			wait.For(t, "its end", p.Done())
			if got := p.Output(); got != "one\ntwo\n"+long || p.ExitCode() != 3 {
				t.Errorf("log %q: exit code %d, %d bytes", log, p.ExitCode(), len(got))
			}
		}
	}
}

func TestFailureShowsOutput(t *testing.T) {
	for _, failed := range []bool{false, true} {
		o := &outer{failed: failed}
		p := Start(o, shell("echo how it went; exec sleep 1000"))
		p.Prints("how it went")
		if p.Ended() || p.State() != nil || p.ExitCode() != -1 {
			t.Errorf("it ended: %v", p.State())
		}
		if log := o.end(); strings.Contains(log, "script printed:\nhow it went") != failed {
			t.Errorf("failed %v: log %q", failed, log)
		}
		gone(t, p)
	}
}

func TestFailureShowsGoroutines(t *testing.T) {
	c := shell("trap 'echo goroutines; exit' QUIT; echo ready; while :; do sleep 0.01; done")
	c.Trace = true
	o := &outer{}
	p := Start(o, c)
	p.Prints("ready")
	o.failed = true
	if log := o.end(); !strings.Contains(log, "goroutines") {
		t.Errorf("log %q", log)
	}
	gone(t, p)
}

func TestWait(t *testing.T) {
	for _, log := range []string{"", filepath.Join(t.TempDir(), "log")} {
		c := shell("echo a 1; printf 'b '; read go; echo 2; printf c; read go")
		c.Log = log
		in, err := c.Cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		p := Start(t, c)
		line := func(prefix string) (string, error) {
			ctx, cancel := context.WithTimeout(t.Context(), wait.Limit())
			defer cancel()
			return p.Wait(ctx, func(l string) bool { return strings.HasPrefix(l, prefix) })
		}
		if got, err := line("a"); got != "a 1" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
		p.Prints("b ") // half a line
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if got, err := p.Wait(ended, func(l string) bool { return strings.HasPrefix(l, "b") }); !errors.Is(err, context.Canceled) {
			t.Errorf("half a line is %q, %v", got, err)
		}
		_, _ = in.Write([]byte("\n"))
		if got, err := line("b"); got != "b 2" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
		_, _ = in.Write([]byte("\n"))
		if got, err := line("c"); got != "c" || err != nil { // the last one, without its end
			t.Errorf("%q, %v", got, err)
		}
		if _, err := line("d"); err == nil || !strings.Contains(err.Error(), "it ended: exit status") {
			t.Errorf("error %v", err)
		}
	}
}

func TestStop(t *testing.T) {
	o := &outer{}
	p := Start(o, shell("trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done"))
	p.Prints("ready")
	if code := p.Stop(syscall.SIGTERM); code != 7 || o.failed {
		t.Errorf("exit code %d: %s", code, o.log.String())
	}
	p.Signal(os.Interrupt) // of no consequence
	o.end()

	c := shell("trap '' TERM; echo ready; while :; do sleep 0.01; done")
	c.Patience = 100 * time.Millisecond
	p = Start(o, c)
	p.Prints("ready")
	if code := p.Stop(syscall.SIGTERM); code != -1 || !o.failed {
		t.Errorf("exit code %d of a process that was killed, failed %v", code, o.failed)
	}
	gone(t, p)
}

// A process that does not end by its signal is killed when the test ends.
func TestNoProcessStays(t *testing.T) {
	o := &outer{}
	c := shell("trap '' TERM; echo ready; while :; do sleep 0.01; done")
	c.End, c.Patience = syscall.SIGTERM, 100*time.Millisecond
	p := Start(o, c)
	p.Prints("ready")
	o.end()
	gone(t, p)
}

// What a process leaves behind with its output does not hold up its end forever.
func TestOutputOfChildren(t *testing.T) {
	c := shell("sleep 1000 & echo $!")
	c.Cmd.WaitDelay = 100 * time.Millisecond
	p := Start(t, c)
	wait.For(t, "its end", p.Done())
	var child int
	if _, err := fmt.Sscan(p.Output(), &child); err != nil || p.ExitCode() != 0 {
		t.Fatalf("exit code %d, %v", p.ExitCode(), err)
	}
	if err := syscall.Kill(child, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
}

func TestTextThatDoesNotCome(t *testing.T) {
	o := &outer{}
	p := Start(o, shell("echo only this; exit 1"))
	o.try(func() { p.Prints("only", "another") })
	if log := o.end(); !o.failed || !strings.Contains(log, `"another" is not in the output of script: it ended: exit status 1`) || !strings.Contains(log, "only this") {
		t.Errorf("log %q", log)
	}
}

func TestStartFails(t *testing.T) {
	o := &outer{}
	o.try(func() { Start(o, Command{Cmd: exec.Command("/nonexistent/program")}) })
	if log := o.end(); !strings.Contains(log, "start program: ") {
		t.Errorf("log %q", log)
	}
}
