// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/leak"
)

// childVar makes the test binary play a part instead of running tests.
const childVar = "FAIRLEAD_OBSERVER_CHILD"

func TestMain(m *testing.M) {
	if part := os.Getenv(childVar); part != "" {
		play(part)
		return
	}
	leak.Main(m)
}

// play is a process with a TCP and a UDP socket that lives until it is killed. It reads how it
// goes on from its descriptor 3, and writes its owner then: pid and name.
func play(part string) {
	way, number, _ := strings.Cut(part, " ")
	if way == "sleep" {
		fmt.Println("ready")
		forever(nil)
	}
	n, err := strconv.Atoi(number)
	if way == "serve" {
		if err = errors.Join(err, unix.Listen(n, 1)); err == nil {
			fmt.Println("ready")
		}
		forever(err)
	}
	to := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: n}
	tcp, terr := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	udp, uerr := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	err = errors.Join(err, terr, uerr)
	if way != wayShared {
		err = errors.Join(err, unix.Bind(tcp, to), unix.Bind(udp, to))
	}
	if way != wayShared && way != wayServed {
		err = errors.Join(err, unix.Listen(tcp, 1))
	}
	if err != nil {
		forever(err)
	}
	fmt.Println("ready")
	_, _ = os.NewFile(3, "go").Read(make([]byte, 1))
	forever(goOn(way, tcp, udp, to))
}

// The ways in which a process comes to have a socket, or another name. No hook tells of those
// from wayLeave on.
const (
	wayExec    = "exec"    // it runs another program
	wayRename  = "rename"  // it gets a name
	waySpawn   = "spawn"   // a child has the sockets, too
	wayServed  = "served"  // and listens
	wayEnd     = "end"     // and the parent ends
	wayThreads = "threads" // its first thread ends
	wayLeave   = "leave"   // a child has the sockets, and the parent closes them
	wayShared  = "shared"  // a child with the same table of descriptors binds
	wayKept    = "kept"    // an older process gets a copy
	wayGiven   = "given"   // and this one closes them
)

func goOn(way string, tcp, udp int, to *unix.SockaddrInet4) error {
	stays := os.Getpid()
	owner, name := stays, ""
	var err error
	switch way {
	case wayExec:
		fmt.Println(stays, "sleep")
		return unix.Exec("/bin/sleep", []string{"sleep", "1000"}, nil)
	case wayRename:
		name, err = "renamed", os.WriteFile("/proc/self/comm", []byte("renamed"), 0)
	case waySpawn:
		_, err = spawn("/bin/sleep", "600")
	case wayEnd, wayLeave:
		name = "sleep"
		owner, err = spawn("/bin/sleep", "600")
	case wayServed:
		err = os.Setenv(childVar, fmt.Sprintf("serve %d", tcp))
		_, serr := spawn("/proc/self/exe")
		err = errors.Join(err, serr)
	case wayShared:
		err = share(tcp, udp, to)
	case wayKept, wayGiven:
		owner = os.Getppid()
	}
	if name == "" {
		b, rerr := os.ReadFile(fmt.Sprintf("/proc/%d/comm", owner))
		name, err = strings.TrimSpace(string(b)), errors.Join(err, rerr)
	}
	if err != nil {
		return err
	}
	fmt.Println(owner, name)
	switch way {
	case wayEnd:
		os.Exit(0)
	case wayLeave, wayGiven:
		return errors.Join(unix.Close(tcp), unix.Close(udp))
	case wayThreads:
		endFirstThread()
	}
	return nil
}

// spawn starts a program with all sockets.
func spawn(program string, args ...string) (pid int, err error) {
	cmd := exec.Command(program, args...)
	err = cmd.Start()
	if err != nil {
		return 0, err
	}
	return cmd.Process.Pid, nil
}

// share has a child that shares the descriptors bind the sockets. It runs no more of Go than
// this, and ends with the calling thread.
func share(tcp, udp int, to *unix.SockaddrInet4) error {
	runtime.LockOSThread()
	a := unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: to.Addr}
	binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&a.Port))[:], uint16(to.Port))
	at := uintptr(unsafe.Pointer(&a))
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_FILES|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		_, _, _ = unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0, 0)
		_, _, _ = unix.RawSyscall6(unix.SYS_BIND, uintptr(tcp), at, unix.SizeofSockaddrInet4, 0, 0, 0)
		_, _, _ = unix.RawSyscall6(unix.SYS_LISTEN, uintptr(tcp), 1, 0, 0, 0, 0)
		_, _, _ = unix.RawSyscall6(unix.SYS_BIND, uintptr(udp), at, unix.SizeofSockaddrInet4, 0, 0, 0)
		for {
			_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
		}
	}
	return nil
}

// endFirstThread ends the thread that the process is named by.
func endFirstThread() {
	for first := false; !first; {
		on := make(chan bool)
		go func() {
			runtime.LockOSThread() // no other goroutine gets this thread
			first := unix.Gettid() == unix.Getpid()
			if on <- first; first {
				_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
			}
			select {}
		}()
		first = <-on
	}
}

// forever ends the process with an error, or waits until it is killed.
func forever(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for { // the runtime's own signals end a pause
		_ = unix.Pause()
	}
}
