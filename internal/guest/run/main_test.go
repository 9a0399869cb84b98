// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package run

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/fairlead/fairlead/internal/testkit/leak"
)

// roleVariable makes the test binary an agent.
const roleVariable = "FAIRLEAD_TEST_PROCESS"

// jobArgument, the first one, makes it a program that is run: programs do not get the
// environment of the agent.
const jobArgument = "job"

func TestMain(m *testing.M) {
	if inner, err := Inner(os.Args[1:]); inner {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 2 && os.Args[1] == jobArgument {
		os.Exit(jobs[os.Args[2]](os.Args[3:]))
	}
	switch role, args, _ := strings.Cut(os.Getenv(roleVariable), " "); role {
	case "":
		leak.Main(m)
	case "agent":
		fmt.Println(playAgent(args))
		os.Exit(1)
	case "limited":
		if err := playLimited(args); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	case "delegate":
		fmt.Println(playDelegate(args))
	}
}

// testKey is a key in the session keyring of whoever starts an agent.
const testKey = "fairlead-test"

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func windowSize() string {
	columns, rows, err := term.GetSize(0)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%dx%d", rows, columns)
}

// describeTerminal tells whose the terminal is, whether its user can open it by its path,
// whether it is the session's, and whether it is all three streams.
func describeTerminal() string {
	var st [3]unix.Stat_t
	for fd := range st {
		if err := unix.Fstat(fd, &st[fd]); err != nil {
			return err.Error()
		}
	}
	f, err := os.OpenFile("/dev/stdout", os.O_RDWR|unix.O_NOCTTY, 0)
	if err == nil {
		_ = f.Close()
	}
	front, ferr := unix.IoctlGetInt(0, unix.TIOCGPGRP)
	session, serr := unix.Getsid(0)
	return fmt.Sprintf("owner=%d mode=%o mine=%t session=%t all=%t", st[0].Uid, st[0].Mode&0o777, err == nil,
		ferr == nil && serr == nil && front == os.Getpid() && session == os.Getpid(), st[0].Rdev == st[1].Rdev && st[1].Rdev == st[2].Rdev)
}

// jobs are the programs, by name. They return an exit status.
var jobs = map[string]func(args []string) int{
	"patterns": func([]string) int { return 0 },
	"args": func(args []string) int {
		fmt.Printf("%q %q\n", args, os.Environ())
		return 7
	},
	"who": func([]string) int {
		dir, _ := os.Getwd()
		groups, _ := os.Getgroups()
		status, _ := os.ReadFile("/proc/self/status")
		fmt.Println(os.Getuid(), os.Geteuid(), os.Getgid(), groups, dir)
		for line := range bytes.Lines(status) {
			if bytes.HasPrefix(line, []byte("Cap")) && !bytes.HasPrefix(line, []byte("CapBnd")) || bytes.HasPrefix(line, []byte("NoNewPrivs")) {
				_, _ = os.Stdout.Write(line)
			}
		}
		return 0
	},
	"descriptors": func([]string) int {
		entries, err := os.ReadDir("/proc/self/fd")
		for _, e := range entries {
			to, _ := os.Readlink("/proc/self/fd/" + e.Name())
			fmt.Println(e.Name(), to)
		}
		if err != nil {
			return 1
		}
		return 0
	},
	"keys": func([]string) int {
		id, err := unix.KeyctlSearch(unix.KEY_SPEC_SESSION_KEYRING, "user", testKey, 0)
		fmt.Println(id, err)
		return btoi(err == nil)
	},
	"cat": func([]string) int {
		if _, err := io.Copy(os.Stdout, os.Stdin); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	},
	"commit": func(args []string) int { // makes a file when it has the whole input
		signal.Ignore(syscall.SIGHUP)
		fmt.Println("ready")
		_, _ = io.Copy(io.Discard, os.Stdin)
		if err := os.WriteFile(args[0], nil, 0o644); err != nil {
			fmt.Println(err)
			return 1
		}
		return 0
	},
	"both": func([]string) int { // 10 MiB, in turns
		b := bytes.Repeat([]byte("0123456789abcdef"), 1<<10)
		for range 320 {
			_, _ = os.Stdout.Write(b)
			_, _ = os.Stderr.Write(b)
		}
		return 0
	},
	"signals": func([]string) int {
		got := make(chan os.Signal, 4)
		signal.Notify(got, syscall.SIGUSR1, syscall.SIGTERM)
		fmt.Println("ready")
		for s := range got {
			fmt.Println(s)
			if s == syscall.SIGTERM {
				return 3
			}
		}
		return 0
	},
	"fork": func([]string) int { // a child in a session of its own, which holds the streams open
		cmd := exec.Command("/proc/self/exe", jobArgument, "sleep")
		cmd.Stdout, cmd.SysProcAttr = os.Stdout, &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("started")
		return 5
	},
	"forksleep": func([]string) int {
		cmd := exec.Command("/proc/self/exe", jobArgument, "sleep")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("started")
		time.Sleep(time.Hour)
		return 0
	},
	"hog": func([]string) int { // 256 MiB
		b := make([]byte, 256<<20)
		for i := 0; i < len(b); i += 1 << 12 {
			b[i] = 1
		}
		return btoi(b[0] == 0)
	},
	"many": func([]string) int { // a hundred processes
		for range 100 {
			cmd := exec.Command("/proc/self/exe", jobArgument, "sleep")
			if err := cmd.Start(); err != nil {
				return 6
			}
		}
		return 0
	},
	"sleep": func([]string) int {
		time.Sleep(time.Hour)
		return 0
	},
	"terminal": func([]string) int { // shows its terminal, until it gets SIGQUIT
		got := make(chan os.Signal, 4)
		signal.Notify(got, syscall.SIGWINCH, syscall.SIGINT, syscall.SIGQUIT)
		fmt.Println(windowSize(), os.Getenv("TERM"), describeTerminal())
		for s := range got {
			switch s {
			case syscall.SIGQUIT:
				fmt.Println(s)
				return 9
			case syscall.SIGWINCH:
				fmt.Println(s, windowSize())
			default:
				fmt.Println(s)
			}
		}
		return 0
	},
	"terminalcat": func([]string) int {
		fmt.Println("ready")
		_, _ = io.Copy(os.Stdout, os.Stdin)
		return 0
	},
	"terminalsum": func([]string) int { // of a megabyte
		if _, err := term.MakeRaw(0); err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("ready")
		h := sha256.New()
		if _, err := io.CopyN(h, os.Stdin, 1<<20); err != nil {
			fmt.Println(err)
		}
		fmt.Printf("%x", h.Sum(nil))
		return 0
	},
	"terminaldeaf": func([]string) int { // reads nothing
		if _, err := term.MakeRaw(0); err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("ready")
		time.Sleep(time.Hour)
		return 0
	},
	"terminaltick": func([]string) int {
		for {
			fmt.Println("tick")
			time.Sleep(time.Millisecond)
		}
	},
	"reopen": func([]string) int { // closes its terminal, and opens it again
		for fd := range 3 {
			_ = unix.Close(fd)
		}
		time.Sleep(10 * time.Millisecond)
		tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
		if err != nil {
			return 1
		}
		fmt.Fprintln(tty, "again")
		if _, err := tty.Read(make([]byte, 1)); err != nil {
			return 2
		}
		return 4
	},
	"killed": func([]string) int {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	},
}
