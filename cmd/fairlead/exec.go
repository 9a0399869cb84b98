// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/config/trust"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/status"
)

const (
	maxQueued   = 256             // changes that wait for the command
	commandTime = time.Minute     // for one run of it
	commandEnd  = 2 * time.Second // for it to end when fairlead does
)

// runner runs a command for each change, one at a time and in order, with the change as JSON
// on its standard input.
type runner struct {
	argv   []string
	stderr io.Writer // also of the command, and of its standard output
	limit  time.Duration

	wake    schedule.Signal
	mu      sync.Mutex
	queue   [][]byte
	dropped int // of the queue, since they were last reported
}

// newRunner returns a runner of a program that is there.
func newRunner(program string, args []string, stderr io.Writer) (*runner, error) {
	path, err := programPath(program)
	if err != nil {
		return nil, fmt.Errorf("--exec: %w", err)
	}
	return &runner{argv: append([]string{path}, args...), stderr: stderr, limit: commandTime, wake: schedule.NewSignal()}, nil
}

// programPath returns the absolute path of a program that a user names. A name without a
// directory is looked for in PATH, where only programs are taken that no other user can
// change.
func programPath(name string) (string, error) {
	if filepath.Base(name) == name {
		return trust.InPath(name)
	}
	path, err := filepath.Abs(name)
	if err != nil {
		return "", err
	}
	fi, err := os.Stat(path)
	if err == nil && !fi.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a file", path)
	}
	return path, err
}

// add queues a change. What was there when the watch began is none. If too many wait, the
// oldest is dropped.
func (r *runner) add(e status.Event) error {
	if e.Type == status.Present || e.Type == status.Synced {
		return nil
	}
	line, err := json.Marshal(versioned(e))
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == maxQueued {
		r.queue = r.queue[1:]
		r.dropped++
	}
	r.queue = append(r.queue, append(line, '\n'))
	r.wake.Notify()
	return nil
}

// take returns the next change, nil if there is none, and how many before it were dropped.
func (r *runner) take() (line []byte, dropped int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == 0 {
		return nil, 0
	}
	line, dropped = r.queue[0], r.dropped
	r.queue, r.dropped = r.queue[1:], 0
	return line, dropped
}

// start runs r in the background until ctx ends or stop, which waits for the command's end,
// is called.
func (r *runner) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { r.run(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

// run runs the command until ctx ends. What waits then is not run.
func (r *runner) run(ctx context.Context) {
	for ctx.Err() == nil {
		line, dropped := r.take()
		if dropped > 0 {
			_, _ = fmt.Fprintf(r.stderr, "fairlead: %s is slower than the ports change: %d changes were not passed on\n", r.argv[0], dropped)
		}
		if line == nil {
			_ = schedule.Wait(ctx, time.Time{}, r.wake)
			continue
		}
		if err := r.once(ctx, line); err != nil && ctx.Err() == nil {
			_, _ = fmt.Fprintf(r.stderr, "fairlead: %s: %v\n", r.argv[0], err)
		}
	}
}

// once runs the command for one change. It is killed if it takes too long.
func (r *runner) once(ctx context.Context, line []byte) error {
	within, cancel := context.WithTimeout(ctx, r.limit)
	defer cancel()
	cmd := exec.CommandContext(within, r.argv[0], r.argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(line), r.stderr, r.stderr
	cmd.WaitDelay = commandEnd
	killWhole(cmd)
	err := cmd.Run()
	if within.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("killed after %s", r.limit)
	}
	return err
}
