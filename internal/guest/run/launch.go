// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/peer"
)

// The descriptors of a launcher beside the streams of its program.
const (
	launchFD = 3 + iota // a socket to the helper
	imageFD             // what it executes
)

// launch is a message of the helper to a launcher. The launcher answers with a report when it is
// ready, and with another one if the program cannot begin. The socket is closed when it begins.
type launch struct {
	identity
	Group     string // the directory of the job's cgroup
	Directory string
	Args, Env []string
}

// maxLaunch is more than a socket takes in one message, in bytes.
const maxLaunch = 256 << 10

// identity is a user with all groups.
type identity struct {
	UID, GID int
	Groups   []int
}

// launch starts a program, and returns when it has begun, or was killed before.
func (p *prepared) launch(g group, image *os.File) (*exec.Cmd, error) {
	conn, theirs, err := pair()
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	cmd := itself(launcherArgument)
	cmd.Env = []string{"GOMAXPROCS=1", "GODEBUG=asyncpreemptoff=1"} // see execute; nothing interrupts a system call
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = p.streams[0], p.streams[1], p.streams[2], []*os.File{theirs, image}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: p.TTY != nil} // the terminal is its stdin, 0
	err = startWithoutKeys(cmd)
	_ = theirs.Close()
	if err != nil {
		return nil, err
	}
	all := exec.Cmd{Env: slices.Concat(environment(p.user), p.TTY.environment(), p.Env)}
	err = peer.Send(conn, launch{
		identity: p.identity, Group: string(g), Directory: cmp.Or(p.entry.Directory, "/"),
		Args: append([]string{p.entry.Path}, p.Args...), Env: all.Environ(), // the last of each variable
	})
	if err == nil {
		err = awaitBegin(conn)
	}
	if err != nil {
		_ = conn.Close() // a launcher that got no launch ends
		_ = cmd.Wait()
	}
	return cmd, err
}

// awaitBegin waits until a launcher has executed its program, or was killed when it was ready to.
func awaitBegin(conn *net.UnixConn) error {
	for ready := false; ; ready = true {
		var r report
		got, err := peer.Receive(conn, &r)
		got.Close()
		switch {
		case ready && errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("its launcher has ended: %w", err)
		case r.Error != "":
			return errors.New(r.Error)
		}
	}
}

// becomeProgram is a launcher's process: it enters the job's cgroup, becomes the program's user and
// executes the program. It returns if that fails.
//
// The helper cannot do this itself. Go holds a processor, and a lock, until a child has executed
// its program, and from when it is a user's process until then, that user can stop it: by a
// signal, or by a directory on a file system of their own.
func becomeProgram() error {
	err := receiveLaunch()
	text, _ := json.Marshal(report{Error: err.Error()}) // no field can fail
	if _, werr := unix.Write(launchFD, text); werr != nil {
		return fmt.Errorf("%s is for fairlead-run itself: %w", launcherArgument, err)
	}
	return nil
}

// receiveLaunch receives a launch, and executes it.
func receiveLaunch() error {
	if err := unix.CloseRange(launchFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return os.NewSyscallError("close_range", err)
	}
	text := make([]byte, maxLaunch)
	n, err := unix.Read(launchFD, text)
	if err != nil {
		return os.NewSyscallError("read", err)
	}
	var l launch
	if err := json.Unmarshal(text[:n], &l); err != nil {
		return err
	}
	directory, err := unix.BytePtrFromString(l.Directory)
	if err != nil {
		return err
	}
	procs, err := unix.Open(filepath.Join(l.Group, "cgroup.procs"), unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("enter the job's cgroup: %w", err)
	}
	if _, err := unix.Write(launchFD, []byte("{}")); err != nil { // it is ready
		return os.NewSyscallError("write", err)
	}
	return l.execute(procs, directory)
}

// execute executes the program, in the cgroup whose processes are listed in a file.
//
// The limit of that cgroup may be below the number of threads that this process has, so that it
// can make no other. Go makes one when a system call takes long and leaves its processor; a raw
// one keeps that.
func (l *launch) execute(procs int, directory *byte) error {
	self := []byte("0")
	if _, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(procs), uintptr(unsafe.Pointer(&self[0])), 1); errno != 0 {
		return fmt.Errorf("enter the job's cgroup: %w", errno)
	}
	if err := syscall.Setgroups(l.Groups); err != nil {
		return os.NewSyscallError("setgroups", err)
	}
	if err := syscall.Setgid(l.GID); err != nil {
		return os.NewSyscallError("setgid", err)
	}
	if err := syscall.Setuid(l.UID); err != nil {
		return os.NewSyscallError("setuid", err)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_CHDIR, uintptr(unsafe.Pointer(directory)), 0, 0); errno != 0 {
		return os.NewSyscallError("chdir", errno)
	}
	return os.NewSyscallError("execve", syscall.Exec(fmt.Sprintf("/proc/self/fd/%d", imageFD), l.Args, l.Env))
}
