// SPDX-License-Identifier: Apache-2.0

// Package exec runs programs of this machine as the user of this process. What is executed is
// what was checked, and a program ends with all that it started: when it has ended itself,
// when it is killed, and when this process goes, also by kill -9.
package exec

import (
	"errors"
	"io"
)

// ErrChanged is in the error about a file that has not the sum that it must have.
var ErrChanged = errors.New("its SHA-256 is another than the policy's")

// ErrStuck is why a job takes no more orders. It is to be killed.
var ErrStuck = errors.New("the process that guards the program takes no orders")

// Program is what is to be run.
type Program struct {
	Path   string   `json:"path"`           // absolute
	SHA256 string   `json:"sha256"`         // of the file at Path, in hexadecimal digits of lower case
	Args   []string `json:"args,omitempty"` // without the program's name
	Env    []string `json:"env,omitempty"`  // "KEY=VALUE", besides the few variables that each program has
	Dir    string   `json:"dir"`            // where it runs, absolute
}

// Job is a program that runs. Stdin, Stdout and Stderr are the caller's ends of its pipes, each
// for one goroutine. Whoever has a Job calls Wait, and then Close.
type Job struct {
	// Stdin is closed to give the program the end of its input. It gets no end before, unless
	// it is dead.
	Stdin io.WriteCloser
	// Stdout and Stderr return io.EOF after what was written, once Wait has returned or nobody
	// can write any more.
	Stdout, Stderr io.Reader

	Process
}

// Process is a program that runs, with all that it started.
type Process interface {
	// Signal sends the program a signal by its name: HUP, INT, QUIT, TERM, USR1 or USR2. Those
	// that the system does not have are an error. After ErrStuck no further one can be sent.
	Signal(name string) error
	// Kill kills the program and all that it started. It does not wait.
	Kill()
	// Wait returns when the program and all that it started have gone. Signal is the name of the
	// one that killed the program, as "KILL", else empty. With an error it is not known how the
	// program ended, and something of it may still run; see Gone.
	Wait() (code int, signal string, err error)
	// Gone returns when nothing is left of the program that Wait could not see the end of. It is
	// called after Wait, before Close.
	Gone()
	// Close releases the pipes.
	Close()
}

// Start starts a program. It returns once the program runs, which takes as long as to copy its
// file. The error is ErrChanged where the file has another SHA-256.
func Start(p Program) (*Job, error) { return start(p) }
