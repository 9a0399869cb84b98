// SPDX-License-Identifier: Apache-2.0

//go:build unix

package exec

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/run/image"
)

// GuardCommand is the command of fairlead that calls Guard. A process that calls Start needs it.
const GuardCommand = "run-guard"

// goneTimeout bounds how long killed processes take to go.
const goneTimeout = 10 * time.Second

// signals are those that a program can be sent.
var signals = map[string]syscall.Signal{
	"HUP": unix.SIGHUP, "INT": unix.SIGINT, "QUIT": unix.SIGQUIT, "TERM": unix.SIGTERM, "USR1": unix.SIGUSR1, "USR2": unix.SIGUSR2,
}

// The descriptors of a guard. It keeps the other end of stdin open until the input is whole or
// the program is dead: where its parent goes first, the program must not take what it got for
// all.
const (
	guardSocket = 3 + iota
	guardStdin
	guardStdinEnd
	guardStdout
	guardStderr
	guardFiles // one more than the last
)

// guard is the process that starts a program and is the parent of all that this starts. It
// kills them when its own parent goes.
type guard struct {
	input *os.File
	to    *json.Encoder
	kills func() // kills what there is of the job now

	mu      sync.Mutex
	process *os.Process // nil before it has begun
	dead    bool        // the process has ended
	gone    bool        // the parent has
	ending  bool        // everything is being killed
}

// Guard is the process of a guard. It returns when the job has gone.
func Guard() error {
	// The thread that starts the program must live as long: its end kills the program.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	conn, err := connOf(guardSocket)
	if err != nil {
		return fmt.Errorf("%s is started by fairlead alone: %w", GuardCommand, err)
	}
	defer func() { _ = conn.Close() }()
	if err := closeOnExec(); err != nil {
		return err
	}
	var files []*os.File
	for fd := guardStdin; fd < guardFiles; fd++ {
		files = append(files, os.NewFile(uintptr(fd), "stdio"))
	}
	g := &guard{input: files[1], to: json.NewEncoder(conn), kills: func() {}}
	orders := json.NewDecoder(conn)
	var p Program
	if err := orders.Decode(&p); err != nil {
		return err
	}
	stops := make(chan os.Signal, 1)
	signal.Notify(stops, unix.SIGHUP, unix.SIGINT, unix.SIGTERM)
	go func() {
		<-stops
		g.leave()
	}()
	go g.attend(orders)
	return g.run(p, files)
}

// run runs a program to its end, and reports that.
func (g *guard) run(p Program, files []*os.File) error {
	made := newGroup()
	defer func() { _ = endGroup(made) }()
	cmd := &exec.Cmd{
		Args: append([]string{p.Path}, p.Args...), Env: p.Env, Dir: p.Dir,
		Stdin: files[0], Stdout: files[2], Stderr: files[3],
	}
	group, err := startProgram(cmd, p, made)
	closeAll([]*os.File{files[0], files[2], files[3]})
	if err != nil {
		if at, ok := errors.AsType[*os.PathError](err); ok && at.Path == cmd.Path {
			err = at.Err // its path is that of the copy
		}
		return g.to.Encode(report{Error: fmt.Sprintf("start %s in %s: %v", p.Path, p.Dir, err), Changed: errors.Is(err, image.ErrSum)})
	}
	_ = g.to.Encode(report{Group: group})
	g.begun(cmd.Process, func() { killAll(cmd.Process.Pid, group) })
	status := g.reap(cmd.Process.Pid)
	_ = g.input.Close()
	_ = g.to.Encode(report{Exit: &status}) // nobody is left to tell if the parent has gone
	return nil
}

// begun notes that the program has begun.
func (g *guard) begun(p *os.Process, kills func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.process, g.kills = p, kills
	if g.gone {
		g.end()
	}
}

// attend obeys the parent until it has gone.
func (g *guard) attend(orders *json.Decoder) {
	defer g.leave()
	for {
		var o order
		if err := orders.Decode(&o); err != nil {
			return
		}
		if o.Whole {
			_ = g.input.Close()
		}
		if s, ok := signals[o.Signal]; ok {
			g.signal(s)
		}
	}
}

func (g *guard) signal(s syscall.Signal) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.process != nil && !g.dead {
		_ = g.process.Signal(s)
	}
}

// leave ends the job, or has begun end it.
func (g *guard) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gone = true
	if g.process != nil {
		g.end()
	}
}

// end kills what is left of the job until nothing is: reap returns, and the process ends. g.mu
// is held.
func (g *guard) end() {
	if g.ending {
		return
	}
	g.ending = true
	late := time.Now().Add(goneTimeout)
	go func() {
		for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
			g.kills()
			time.Sleep(pause)
			if !late.IsZero() && time.Now().After(late) {
				late = time.Time{}
				_ = g.to.Encode(report{Error: "what the program started does not end, although it was killed"})
			}
		}
	}()
}

// reap waits for the program, and then for all that it left.
func (g *guard) reap(program int) exit {
	var last exit
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil: // no child is left
			return last
		case pid == program && (status.Exited() || status.Signaled()):
			last = exitOf(status)
			g.mu.Lock()
			g.dead = true
			g.end()
			g.mu.Unlock()
		}
	}
}

func exitOf(s unix.WaitStatus) exit {
	if !s.Signaled() {
		return exit{Code: s.ExitStatus()}
	}
	name := unix.SignalName(s.Signal())
	if len(name) > len("SIG") {
		name = name[len("SIG"):]
	}
	return exit{Code: -1, Signal: name}
}
