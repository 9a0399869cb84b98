// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/peer"
)

const (
	// startTimeout bounds how long the helper takes to begin.
	startTimeout = 10 * time.Second
	// endTimeout bounds how long it takes to end, and then to end when it was killed.
	endTimeout = 4 * time.Second
	// jobTimeout bounds how long it takes to copy and start a program.
	jobTimeout = 30 * time.Second
)

// starter has programs started by a helper, which keeps the capabilities that takes.
type starter struct {
	slice string        // the directory of its jobs' cgroups
	conn  *net.UnixConn // to the helper
	ended chan struct{} // closed when the helper has ended

	process *os.Process // the helper
}

// startHelper starts the helper with the capabilities that the process has now.
func startHelper(with setup) (*starter, error) {
	text, err := json.Marshal(with)
	if err != nil {
		return nil, err
	}
	conn, theirs, err := pair()
	if err != nil {
		return nil, err
	}
	cmd := itself(helperArgument)
	cmd.Stdin, cmd.Stderr, cmd.ExtraFiles = bytes.NewReader(text), os.Stderr, []*os.File{theirs}
	cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for the server
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("start the helper: %w", err)
	}
	s := &starter{slice: with.Slice, conn: conn, ended: make(chan struct{}), process: cmd.Process}
	go func() {
		defer close(s.ended)
		_ = cmd.Wait()
	}()
	if err := s.ready(); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// ready waits for the helper's first message.
func (s *starter) ready() error {
	_ = s.conn.SetReadDeadline(time.Now().Add(startTimeout))
	var r report
	got, err := peer.ReceiveLong(s.conn, &r)
	got.Close()
	if err == nil && r.Error != "" {
		err = errors.New(r.Error)
	}
	if err != nil {
		return fmt.Errorf("helper: %w", err)
	}
	return nil
}

// close ends the helper, which kills all jobs, and waits for it. One that does not end is
// killed. Jobs of a helper that was killed are killed, too.
func (s *starter) close() error {
	err := s.conn.Close()
	if !s.endsIn(endTimeout) {
		err = errors.Join(err, s.process.Kill())
		if !s.endsIn(endTimeout) {
			return errors.Join(err, errors.New("the helper does not end"))
		}
	}
	return errors.Join(err, killLeftovers(s.slice, s.process.Pid))
}

// endsIn reports whether the helper ends in this time.
func (s *starter) endsIn(d time.Duration) bool {
	select {
	case <-s.ended:
		return true
	case <-time.After(d):
		return false
	}
}

// wait waits until ctx ends, and closes s. That the helper ends before is an error; its jobs
// are killed.
func (s *starter) wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return s.close()
	case <-s.ended:
		return errors.Join(errors.New("the helper has ended; its programs are killed"), s.close())
	}
}

// startError is why a program was not started.
type startError struct {
	error      // for the log: it may name paths of the guest
	other bool // the file is another program than the policy's
}

// job is a program that runs.
type job struct {
	conn           *net.UnixConn // to the helper; to close it for writing kills the job
	stdin          *os.File
	stdout, stderr *os.File // stderr is nil if it has a terminal
	tty            bool     // stdin and stdout are the terminal's master
	pid            int
}

func (j *job) close() {
	closeAll([]*os.File{j.stdin, j.stdout, j.stderr})
	_ = j.conn.Close()
}

// start starts a program.
func (s *starter) start(q Request) (*job, error) {
	j, theirs, err := newJob(q.TTY != nil)
	if err != nil {
		return nil, err
	}
	if err = j.send(s.conn, q, theirs); err != nil {
		err = fmt.Errorf("the helper has ended: %w", err)
	}
	closeAll(theirs)
	if err == nil {
		err = j.begun()
	}
	if err != nil {
		j.close()
		return nil, err
	}
	return j, nil
}

// send sends the order for a job.
func (j *job) send(conn *net.UnixConn, q Request, theirs []*os.File) error {
	var fds []int
	for _, f := range theirs {
		fds = append(fds, int(f.Fd()))
	}
	if j.tty {
		return peer.Send(conn, order{Request: q}, fds...)
	}
	return peer.Control(j.stdin, func(fd int) error {
		return peer.Send(conn, order{Request: q}, append(fds[:3:3], fd, fds[3])...)
	})
}

// newJob makes the pipes and the socket of a job, and the helper's ends of them. A terminal is
// opened by the helper.
func newJob(tty bool) (j *job, theirs []*os.File, err error) {
	j = &job{tty: tty}
	defer func() {
		if err != nil {
			closeAll(append(theirs, j.stdin, j.stdout, j.stderr)) // nil ones are refused
		}
	}()
	if !tty {
		if theirs, err = j.pipes(); err != nil {
			return nil, theirs, err
		}
	}
	conn, socket, err := pair()
	if err != nil {
		return nil, theirs, err
	}
	j.conn = conn
	return j, append(theirs, socket), nil
}

// pipes makes the streams of a job, and returns the program's ends.
func (j *job) pipes() (theirs []*os.File, err error) {
	stdin, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	j.stdin, theirs = w, append(theirs, stdin)
	for _, to := range []**os.File{&j.stdout, &j.stderr} {
		r, w, err := os.Pipe()
		if err != nil {
			return theirs, err
		}
		*to, theirs = r, append(theirs, w)
	}
	return theirs, nil
}

// begun waits until the helper has started the program.
func (j *job) begun() error {
	_ = j.conn.SetReadDeadline(time.Now().Add(jobTimeout))
	var r report
	got, err := peer.ReceiveLong(j.conn, &r)
	if err != nil {
		return fmt.Errorf("the helper does not answer: %w", err)
	}
	defer got.Close()
	if r.Error != "" {
		return startError{errors.New(r.Error), r.Other}
	}
	if j.tty {
		if err := j.attach(&got); err != nil {
			return err
		}
	}
	j.pid = r.Pid
	return j.conn.SetReadDeadline(time.Time{})
}

// attach takes the master of the terminal that the helper opened. To close stdin must not
// close stdout, so that both have a descriptor.
func (j *job) attach(got *peer.Packet) error {
	fd, ok := got.Take()
	if !ok {
		return errors.New("the helper sent no terminal")
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return errors.Join(err, unix.Close(fd))
	}
	j.stdout = os.NewFile(uintptr(fd), "terminal")
	again, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	j.stdin = os.NewFile(uintptr(again), "terminal")
	return nil
}

// wait returns when the job and all that it started have gone.
func (j *job) wait() (Exit, error) {
	var r report
	got, err := peer.Receive(j.conn, &r)
	got.Close()
	switch {
	case err != nil:
		return Exit{}, fmt.Errorf("the helper has gone: %w", err)
	case r.Exit == nil:
		return Exit{}, errors.New("the helper sent no exit status")
	}
	return *r.Exit, nil
}

// resize sets the size of the terminal.
func (j *job) resize(s Size) {
	_ = peer.Control(j.stdin, func(fd int) error { return resize(fd, s) })
}

func (j *job) signal(s unix.Signal) { _ = peer.Send(j.conn, order{Kill: s}) }

// endInput gives the job the end of its input.
func (j *job) endInput() {
	_ = peer.Send(j.conn, order{Whole: true})
	_ = j.stdin.Close()
}

// kill has the helper kill the job.
func (j *job) kill() { _ = j.conn.CloseWrite() }

// pair returns two ends that are connected, the second to be passed.
func pair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "socket")
	conn, err := connOf(fds[0])
	if err != nil {
		_ = theirs.Close()
	}
	return conn, theirs, err
}
