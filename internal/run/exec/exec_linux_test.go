// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

func TestMain(m *testing.M) {
	if len(os.Args) < 2 || jobs[os.Args[1]] == nil {
		leak.Main(m)
		return
	}
	os.Exit(jobs[os.Args[1]](os.Args[2:]))
}

// jobs are what the test binary is besides a test, by its first argument.
var jobs = map[string]func(args []string) int{
	GuardCommand: func([]string) int {
		if err := Guard(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	},
	"job-cat": func([]string) int {
		_, _ = io.Copy(os.Stdout, os.Stdin)
		fmt.Fprintln(os.Stderr, "end")
		return 7
	},
	"job-args": func(args []string) int {
		dir, _ := os.Getwd()
		fds, _ := os.ReadDir("/proc/self/fd")
		fmt.Printf("%q %s %s %v\n", args, dir, os.Getenv("KEY"), len(fds) <= 6) // 3, the directory and the runtime's
		return 0
	},
	"job-signal": func([]string) int {
		s := make(chan os.Signal, 1)
		signal.Notify(s, syscall.SIGUSR1)
		fmt.Println("ready")
		<-s
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		for {
			_ = unix.Pause() // until a signal, of which the runtime has its own
		}
	},
	// job-tree starts processes of sessions and parents of their own, and prints their numbers.
	"job-tree": func(args []string) int {
		n, _ := strconv.Atoi(args[0])
		signal.Ignore(syscall.SIGTERM, syscall.SIGHUP)
		fmt.Println(os.Getpid())
		if n > 0 {
			cmd := exec.Command("/proc/self/exe", "job-tree", strconv.Itoa(n-1), args[1])
			cmd.Stdout, cmd.SysProcAttr = os.Stdout, &syscall.SysProcAttr{Setsid: true}
			if err := cmd.Start(); err != nil {
				fmt.Println(err)
			}
			if n == 2 { // what it started is an orphan
				return 0
			}
		}
		if n == treeDepth && args[1] == "ends" {
			b := make([]byte, 1)
			_, _ = os.Stdin.Read(b)
			return 3
		}
		for {
			_ = unix.Pause() // until a signal, of which the runtime has its own
		}
	},
	// job-host has a tree of processes run, and waits to be killed.
	"job-host": func(args []string) int {
		j, err := Start(Program{Path: args[0], SHA256: args[1], Args: []string{"job-tree", strconv.Itoa(treeDepth), "stays"}, Dir: "/"})
		if err != nil {
			fmt.Println(err)
			return 1
		}
		_, _ = io.Copy(os.Stdout, j.Stdout)
		return 1
	},
}

// treeDepth is how many generations job-tree starts.
const treeDepth = 4

// program copies the test binary, and returns the path and the sum.
func program(t *testing.T) (path, sum string) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return path, fmt.Sprintf("%x", sha256.Sum256(b))
}

// begin starts a job, which is closed at the end of the test.
func begin(t *testing.T, args ...string) *Job {
	t.Helper()
	path, sum := program(t)
	j, err := Start(Program{Path: path, SHA256: sum, Args: args, Env: []string{"KEY=value"}, Dir: "/tmp"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		j.Kill()
		j.Close()
	})
	return j
}

func TestStreamsAndStatus(t *testing.T) {
	j := begin(t, "job-cat")
	in := bytes.Repeat([]byte("0123456789abcdef"), 1<<14)
	var feed sync.WaitGroup
	feed.Go(func() {
		_, _ = j.Stdin.Write(in)
		_ = j.Stdin.Close()
	})
	out, err := io.ReadAll(j.Stdout)
	if err != nil || !bytes.Equal(out, in) {
		t.Errorf("%d bytes of %d, %v", len(out), len(in), err)
	}
	feed.Wait()
	if code, name, err := j.Wait(); code != 7 || name != "" || err != nil {
		t.Errorf("ended with %d, %q, %v", code, name, err)
	}
	if b, err := io.ReadAll(j.Stderr); string(b) != "end\n" || err != nil {
		t.Errorf("stderr %q, %v", b, err)
	}
}

// What another process holds open keeps neither a writer nor a reader.
func TestWriterIsLetGo(t *testing.T) {
	j := begin(t, "job-tree", "0", "stays")
	pid, err := bufio.NewReader(j.Stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"0", "1"} {
		f, err := os.OpenFile("/proc/"+strings.TrimSpace(pid)+"/fd/"+name, os.O_RDWR|unix.O_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
	}
	written := make(chan error, 1)
	go func() {
		_, err := j.Stdin.Write(make([]byte, 1<<20))
		written <- err
	}()
	j.Kill()
	if _, _, err := j.Wait(); err != nil {
		t.Error(err)
	}
	if err := <-written; err == nil {
		t.Error("all was written")
	}
	if _, err := io.ReadAll(j.Stdout); err != nil {
		t.Error(err)
	}
}

func TestWhatAProgramGets(t *testing.T) {
	j := begin(t, "job-args", "a b", "$(c)\n")
	out, _ := io.ReadAll(j.Stdout)
	if code, name, err := j.Wait(); code != 0 || name != "" || err != nil || string(out) != `["a b" "$(c)\n"] /tmp value true`+"\n" {
		t.Errorf("%s: %d, %q, %v", out, code, name, err)
	}
}

func TestSignals(t *testing.T) {
	j := begin(t, "job-signal")
	if err := j.Signal("KILL"); err == nil {
		t.Error("a signal was sent that cannot be asked for")
	}
	if line, err := bufio.NewReader(j.Stdout).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if err := j.Signal("USR1"); err != nil {
		t.Error(err)
	}
	if code, name, err := j.Wait(); code != -1 || name != "KILL" || err != nil {
		t.Errorf("ended with %d, %q, %v", code, name, err)
	}
}

func TestRefused(t *testing.T) {
	path, sum := program(t)
	before := len(groups(t))
	script := filepath.Join(t.TempDir(), "script")
	text := []byte("#!/bin/sh\n")
	if err := os.WriteFile(script, text, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		p    Program
		want string
	}{
		{Program{Path: path, SHA256: strings.Repeat("0", 64), Dir: "/"}, ErrChanged.Error()},
		{Program{Path: script, SHA256: fmt.Sprintf("%x", sha256.Sum256(text)), Dir: "/"}, "scripts cannot be run"},
		{Program{Path: path + "x", SHA256: sum, Dir: "/"}, "no such file"},
		{Program{Path: path, SHA256: sum, Dir: "/nonexistent"}, "start " + path + " in /nonexistent: no such file"},
		{Program{Path: "/dev/null", SHA256: sum, Dir: "/"}, "no file that can be executed"},
	} {
		j, err := Start(c.p)
		if err == nil || !strings.Contains(err.Error(), c.want) || errors.Is(err, ErrChanged) != (c.want == ErrChanged.Error()) {
			t.Errorf("%+v: %v, %v, want %q", c.p, j, err, c.want)
		}
	}
	wait.Until(t, "the groups of what did not start are removed", func() error {
		if left := groups(t); len(left) > before {
			return fmt.Errorf("%q, %d before", left, before)
		}
		return nil
	})
}

// groups returns the cgroups of jobs beside this process's. It has none where it can make none.
func groups(t *testing.T) []string {
	t.Helper()
	own, err := ownGroup()
	if err != nil {
		return nil
	}
	all, err := filepath.Glob(filepath.Join(own, "fairlead-job-*"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// readTree reads the numbers of a tree's processes.
func readTree(t *testing.T, r io.Reader) (pids []int) {
	t.Helper()
	lines := bufio.NewScanner(r)
	for len(pids) <= treeDepth && lines.Scan() {
		pid, err := strconv.Atoi(lines.Text())
		if err != nil {
			t.Fatal(lines.Text())
		}
		pids = append(pids, pid)
	}
	if len(pids) <= treeDepth {
		t.Fatalf("processes %v, %v", pids, lines.Err())
	}
	return pids
}

// requireGone waits until no process of a tree is left.
func requireGone(t *testing.T, pids []int) {
	t.Helper()
	wait.Until(t, "all processes have gone", func() error {
		for _, pid := range pids {
			if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("process %d of %v: %w", pid, pids, err)
			}
		}
		return nil
	})
}

func TestAllEndsWithTheProgram(t *testing.T) {
	for _, how := range []string{"ends", "is killed", "its guard is killed"} {
		t.Run(how, func(t *testing.T) {
			j := begin(t, "job-tree", strconv.Itoa(treeDepth), "ends")
			pids := readTree(t, j.Stdout)
			wantCode, wantSignal, wantErr := 3, "", ""
			switch how {
			case "ends":
				_, _ = j.Stdin.Write([]byte("x"))
			case "is killed":
				j.Kill()
				wantCode, wantSignal = -1, "KILL"
			default:
				if j.Process.(*job).group == "" {
					pids = pids[:1] // without a cgroup nobody finds the others
				}
				_ = j.Process.(*job).guard.Kill()
				wantCode, wantErr = 0, "the guard has gone"
			}
			code, name, err := j.Wait()
			if code != wantCode || name != wantSignal || (err == nil) != (wantErr == "") || err != nil && !strings.Contains(err.Error(), wantErr) {
				t.Errorf("ended with %d, %q, %v", code, name, err)
			}
			requireGone(t, pids)
		})
	}
}

// A program whose caller goes is killed before it could take what it got for the whole input.
func TestKilledWithItsCaller(t *testing.T) {
	path, sum := program(t)
	killHost(t, path, sum, nil)
}

// killHost starts a process that has a tree run, as another user if cred is not nil, and kills it.
func killHost(t *testing.T, path, sum string, cred *syscall.Credential) {
	t.Helper()
	host := exec.Command(path, "job-host", path, sum)
	host.Dir, host.Stderr, host.SysProcAttr = "/", os.Stderr, &syscall.SysProcAttr{Credential: cred}
	out, err := host.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Start(); err != nil {
		t.Fatal(err)
	}
	pids := readTree(t, out)
	_ = host.Process.Kill()
	_ = host.Wait()
	requireGone(t, pids)
}

// A guard that does not obey is killed, and its job with it.
func TestStoppedGuard(t *testing.T) {
	j := begin(t, "job-tree", strconv.Itoa(treeDepth), "stays")
	pids := readTree(t, j.Stdout)
	p := j.Process.(*job)
	if err := p.guard.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	p.patience = time.Millisecond
	j.Kill()
	if _, _, err := j.Wait(); err == nil {
		t.Error("the end of the program is known")
	}
	requireGone(t, pids[:1])
}

// A guard that is stopped takes so many orders as its socket holds, and no caller waits for it.
func TestStoppedGuardTakesNoOrders(t *testing.T) {
	j := begin(t, "job-tree", strconv.Itoa(treeDepth), "stays")
	pids := readTree(t, j.Stdout)
	p := j.Process.(*job)
	if err := p.guard.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	p.patience, p.orders = time.Millisecond, 10*time.Millisecond
	var err error
	for range 1 << 20 {
		if err = j.Signal("USR1"); err != nil {
			break
		}
	}
	if !errors.Is(err, ErrStuck) {
		t.Errorf("%v, want %v", err, ErrStuck)
	}
	j.Kill()
	if _, _, err := j.Wait(); err == nil {
		t.Error("the end of the program is known")
	}
	requireGone(t, pids[:1])
}
