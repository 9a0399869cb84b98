// SPDX-License-Identifier: Apache-2.0

package program

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/output"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// Command says what to start and how it ends.
type Command struct {
	// Cmd is the program; Start and Launch take it over. Output that it directs nowhere
	// is kept, standard output and error in one.
	Cmd *exec.Cmd
	// Name is the program's in messages; that of its file if empty.
	Name string
	// In starts the program, as a network namespace does; nil starts it here.
	In interface{ Start(cmd *exec.Cmd) error }
	// Log is a file that the program appends its output to. What it leaves behind may
	// write on. If it is empty, the output is kept in memory.
	Log string
	// End is the signal that ends the program with the test: SIGKILL if nil.
	End os.Signal
	// Trace has a Go program print its goroutines if the test failed.
	Trace bool
	// Patience is how long Stop waits before it sends SIGKILL: wait.Limit if 0.
	Patience time.Duration
}

// Process is a program that was started. It is safe for concurrent use.
type Process struct {
	t    testing.TB // nil of Launch
	c    Command
	done chan struct{}
	out  output.Buffer
	skip int64 // bytes of Log that others wrote before
}

// held is how long a process that has ended is waited for by what holds its output.
const held = 10 * time.Second

// Start starts a program that ends with the test, which waits for that. If the test fails,
// it shows the program's output.
func Start(t testing.TB, c Command) *Process {
	t.Helper()
	p, err := Launch(c)
	if err != nil {
		t.Fatal(err)
	}
	p.t = t
	t.Cleanup(func() {
		if t.Failed() && p.c.Trace {
			p.end(syscall.SIGQUIT)
		}
		p.end(cmp.Or[os.Signal](p.c.End, syscall.SIGKILL))
		if t.Failed() {
			t.Logf("%s printed:\n%s", p.c.Name, shorten(p.Output()))
		}
	})
	return p
}

// Launch starts a program for what is no test. The caller ends it with Stop or Kill.
func Launch(c Command) (*Process, error) {
	c.Name = cmp.Or(c.Name, filepath.Base(c.Cmd.Path))
	c.Patience = cmp.Or(c.Patience, wait.Limit())
	c.Cmd.WaitDelay = cmp.Or(c.Cmd.WaitDelay, held)
	p := &Process{c: c, done: make(chan struct{})}
	if c.Cmd.Stdout == nil && c.Cmd.Stderr == nil {
		var out io.Writer = &p.out
		if c.Log != "" {
			f, err := os.OpenFile(c.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
			if err != nil {
				return nil, err
			}
			defer func() { _ = f.Close() }() // the process has it
			if p.skip, err = f.Seek(0, io.SeekEnd); err != nil {
				return nil, err
			}
			out = f
		}
		c.Cmd.Stdout, c.Cmd.Stderr = out, out
	}
	start := c.Cmd.Start
	if c.In != nil {
		start = func() error { return c.In.Start(c.Cmd) }
	}
	if err := start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Name, err)
	}
	go func() {
		defer close(p.done)
		_ = c.Cmd.Wait()
	}()
	return p, nil
}

// Name is the program's in messages.
func (p *Process) Name() string { return p.c.Name }

// PID is the number of the process, also after its end.
func (p *Process) PID() int { return p.c.Cmd.Process.Pid }

// Done is closed when the process has ended and its output is complete.
func (p *Process) Done() <-chan struct{} { return p.done }

// Ended reports whether Done is closed.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// State says how the process ended; nil until then.
func (p *Process) State() *os.ProcessState {
	if !p.Ended() {
		return nil
	}
	return p.c.Cmd.ProcessState
}

// ExitCode is that of the process, or -1 if it has not ended or a signal ended it.
func (p *Process) ExitCode() int { return p.State().ExitCode() }

// Output returns what the process has written so far.
func (p *Process) Output() string {
	if p.c.Log == "" {
		return p.out.String()
	}
	f, err := os.Open(p.c.Log)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.NewSectionReader(f, p.skip, 1<<40))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// Wait returns the first line, of all that the process writes, that matches. It is an
// error if ctx or the process ends first.
func (p *Process) Wait(ctx context.Context, match func(line string) bool) (line string, err error) {
	return line, p.until(ctx, func(out string) bool {
		for l := range strings.Lines(out) {
			l, whole := strings.CutSuffix(l, "\n")
			if (whole || p.Ended()) && match(l) {
				line = l
				return true
			}
		}
		return false
	})
}

// Prints waits until each of these texts is in the output, which reaches the test with a
// delay. It fails the test if one is missing after wait.Limit.
func (p *Process) Prints(texts ...string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait.Limit())
	defer cancel()
	for _, text := range texts {
		if err := p.until(ctx, func(out string) bool { return strings.Contains(out, text) }); err != nil {
			p.t.Fatalf("%q is not in the output of %s: %v", text, p.c.Name, err)
		}
	}
}

// until calls holds with the output at each change until it returns true.
func (p *Process) until(ctx context.Context, holds func(out string) bool) error {
	var look <-chan time.Time // a file reports no change
	if p.c.Log != "" {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		look = tick.C
	}
	for {
		ended, changed := p.Ended(), p.out.Changed()
		if holds(p.Output()) {
			return nil
		}
		if ended {
			return fmt.Errorf("it ended: %s", p.State())
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-p.done:
		case <-changed:
		case <-look:
		}
	}
}

// Signal sends a signal, if the process has not ended.
func (p *Process) Signal(sig os.Signal) {
	if err := p.c.Cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) && p.t != nil {
		p.t.Errorf("send %v to %s: %v", sig, p.c.Name, err)
	}
}

// Stop sends a signal, waits for the end and returns the exit code. A process that is there
// after its patience is killed, which fails the test.
func (p *Process) Stop(sig os.Signal) int {
	if !p.end(sig) && p.t != nil {
		p.t.Errorf("%v did not end %s within %v", sig, p.c.Name, p.c.Patience)
	}
	return p.ExitCode()
}

// Kill kills the process and waits for its end.
func (p *Process) Kill() { p.end(syscall.SIGKILL) }

// killPatience is the least time in which a killed process, and its children that have its output,
// must end: the machine may be busy.
const killPatience = 10 * time.Second

// end reports whether the signal was enough.
func (p *Process) end(sig os.Signal) bool {
	_ = p.c.Cmd.Process.Signal(sig)
	timeout := time.NewTimer(p.c.Patience)
	defer timeout.Stop()
	select {
	case <-p.done:
		return true
	case <-timeout.C:
	}
	_ = p.c.Cmd.Process.Kill()
	patience := max(p.c.Patience, killPatience)
	select {
	case <-p.done:
	case <-time.After(patience):
		if p.t != nil {
			p.t.Errorf("SIGKILL did not end %s within %v", p.c.Name, patience)
		}
	}
	return false
}

// shown is how many bytes of output are shown of its begin, and of its end.
const shown = 64 << 10

func shorten(out string) string {
	if len(out) <= 2*shown {
		return out
	}
	return fmt.Sprintf("%s\n(%d bytes left out)\n%s", out[:shown], len(out)-2*shown, out[len(out)-shown:])
}
