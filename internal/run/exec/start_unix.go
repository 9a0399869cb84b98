// SPDX-License-Identifier: Apache-2.0

//go:build unix

package exec

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// startTimeout bounds how long it takes to copy and start a program.
	startTimeout = 30 * time.Second
	// endTimeout bounds how long a guard takes to end its program before it is killed itself.
	endTimeout = 15 * time.Second
	// orderTimeout bounds how long a guard takes to take an order.
	orderTimeout = 5 * time.Second
)

// order is a message to a guard, after the Program.
type order struct {
	Signal string `json:"signal,omitempty"`
	Whole  bool   `json:"whole,omitempty"` // the input: the program may see its end
}

// report is a message of a guard: one when the program runs, and one when all have gone.
type report struct {
	Error string `json:"error,omitempty"`
	// Changed says that the error is ErrChanged.
	Changed bool `json:"changed,omitempty"`

	Group string `json:"group,omitempty"` // directory of the program's cgroup
	Exit  *exit  `json:"exit,omitempty"`  // the last
}

type exit struct {
	Code   int    `json:"code"`
	Signal string `json:"signal,omitempty"`
}

// changedError is an ErrChanged that a guard has told.
type changedError string

func (e changedError) Error() string { return string(e) }
func (e changedError) Unwrap() error { return ErrChanged }

// job is a program, and the process that guards it.
type job struct {
	conn   *net.UnixConn // to the guard; to close it for writing kills the job
	from   *json.Decoder
	guard  *os.Process
	ended  chan struct{} // closed when the guard has ended
	group  string
	stdin  *os.File
	output [2]output

	patience, orders time.Duration // endTimeout and orderTimeout, but for tests

	mu sync.Mutex // held while an order is sent
}

func start(p Program) (*Job, error) {
	p.Env = append(environment(), p.Env...)
	j, theirs, err := newJob()
	if err != nil {
		return nil, err
	}
	err = j.startGuard(theirs)
	if err == nil {
		j.stdin, err = pollable(theirs[guardStdinEnd-guardSocket])
	}
	closeAll(theirs)
	if err == nil {
		err = j.begin(p)
	}
	if err != nil {
		j.Kill()
		j.Close()
		return nil, err
	}
	return &Job{Stdin: input{j}, Stdout: &j.output[0], Stderr: &j.output[1], Process: j}, nil
}

// Privileged reports whether programs would run as root.
func Privileged() bool { return os.Geteuid() == 0 }

// environment is what each program has; nothing else of this process's is in it.
func environment() []string {
	env := []string{"PATH=/usr/local/bin:/usr/bin:/bin"}
	if u, err := user.Current(); err == nil {
		env = append(env, "HOME="+u.HomeDir, "USER="+u.Username, "LOGNAME="+u.Username)
	}
	return env
}

// newJob makes the pipes and the socket of a job, and the guard's ends in the order of its
// descriptors.
func newJob() (j *job, theirs []*os.File, err error) {
	j = &job{ended: make(chan struct{}), patience: endTimeout, orders: orderTimeout}
	defer func() {
		if err != nil {
			closeAll(theirs)
			j.Close()
		}
	}()
	fds, err := socketPair()
	if err != nil {
		return j, theirs, err
	}
	theirs = append(theirs, os.NewFile(uintptr(fds[1]), "socket"))
	if j.conn, err = connOf(fds[0]); err != nil {
		return j, theirs, err
	}
	j.from = json.NewDecoder(j.conn)
	stdin, w, err := os.Pipe()
	if err != nil {
		return j, theirs, err
	}
	theirs = append(theirs, stdin, w)
	for i := range j.output {
		r, w, err := os.Pipe()
		if err != nil {
			return j, theirs, err
		}
		j.output[i].file, theirs = r, append(theirs, w)
	}
	return j, theirs, nil
}

func (j *job) startGuard(theirs []*os.File) error {
	self, err := self()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, GuardCommand)
	cmd.Env, cmd.Dir, cmd.Stderr, cmd.ExtraFiles = []string{}, "/", os.Stderr, theirs
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for this process
	if err := cmd.Start(); err != nil {
		close(j.ended)
		return fmt.Errorf("start the guard: %w", err)
	}
	j.guard = cmd.Process
	go func() {
		defer close(j.ended)
		_ = cmd.Wait()
	}()
	return nil
}

// begin has the guard start the program.
func (j *job) begin(p Program) error {
	_ = j.conn.SetDeadline(time.Now().Add(startTimeout))
	if err := json.NewEncoder(j.conn).Encode(p); err != nil {
		return fmt.Errorf("the guard has gone: %w", err)
	}
	var r report
	switch err := j.from.Decode(&r); {
	case err != nil:
		return fmt.Errorf("the guard does not answer: %w", err)
	case r.Changed:
		return changedError(r.Error)
	case r.Error != "":
		return errors.New(r.Error)
	}
	j.group = r.Group
	return j.conn.SetDeadline(time.Time{})
}

// pollable returns a pipe's end of our own, whose writes can be ended: to pass it on has made
// them block.
func pollable(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fd), "stdin"), nil
}

func (j *job) send(o order) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	_ = j.conn.SetWriteDeadline(time.Now().Add(j.orders))
	if err := json.NewEncoder(j.conn).Encode(o); err != nil {
		return fmt.Errorf("%w: %w", ErrStuck, err)
	}
	return nil
}

// Signal implements Process.
func (j *job) Signal(name string) error {
	if _, ok := signals[name]; !ok {
		return fmt.Errorf("signal %q: want HUP, INT, QUIT, TERM, USR1 or USR2", name)
	}
	return j.send(order{Signal: name})
}

// Kill implements Process.
func (j *job) Kill() {
	_ = j.conn.CloseWrite()
	if j.guard == nil {
		return
	}
	go func() { // for a guard that is stopped, or that cannot end the job
		select {
		case <-j.ended:
		case <-time.After(j.patience):
			_ = j.guard.Kill()
		}
	}()
}

// Wait implements Process.
func (j *job) Wait() (int, string, error) {
	var r report
	err := j.from.Decode(&r)
	// What another process than the job's holds open may never end.
	_ = j.stdin.SetWriteDeadline(time.Now())
	for i := range j.output {
		_ = j.output[i].file.SetReadDeadline(time.Now())
	}
	switch {
	case err != nil:
		_ = j.guard.Kill()
		<-j.ended
		return 0, "", errors.Join(errors.New("the guard has gone"), endGroup(j.group))
	case r.Exit == nil:
		return 0, "", errors.New(r.Error)
	}
	<-j.ended
	return r.Exit.Code, r.Exit.Signal, nil
}

// Gone implements Process. Without its guard nothing can be seen of what has left the group.
func (j *job) Gone() { <-j.ended }

// Close may be called when a part of the job is missing.
func (j *job) Close() {
	closeAll([]*os.File{j.stdin, j.output[0].file, j.output[1].file}) // nil ones are refused
	if j.conn != nil {
		_ = j.conn.Close()
	}
}

// input is the caller's end of a job's stdin.
type input struct{ j *job }

func (i input) Write(b []byte) (int, error) { return i.j.stdin.Write(b) }

func (i input) Close() error {
	return errors.Join(i.j.send(order{Whole: true}), i.j.stdin.Close())
}

// output is the caller's end of one of a job's outputs. After the file's deadline it returns
// only what is there.
type output struct{ file *os.File }

func (o *output) Read(b []byte) (int, error) {
	n, err := o.file.Read(b)
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return n, err
	}
	raw, err := o.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	cerr := raw.Control(func(fd uintptr) { n, err = unix.Read(int(fd), b) })
	if cerr != nil || err != nil || n <= 0 {
		return 0, io.EOF
	}
	return n, nil
}

// socketPair returns the descriptors of two sockets that are connected.
func socketPair() ([2]int, error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return fds, os.NewSyscallError("socketpair", err)
	}
	unix.CloseOnExec(fds[0])
	unix.CloseOnExec(fds[1])
	return fds, nil
}

// connOf makes a connection of a descriptor, which it owns.
func connOf(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	if f == nil {
		return nil, os.ErrInvalid
	}
	defer func() { _ = f.Close() }()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, errors.New("no unix socket")
	}
	return conn, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
