// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/windows"
)

// These tests also run under wine 8, in which
//   - there are no links, so what refuses them is not tried;
//   - a folder can be renamed while a file in it is open, which Windows refuses;
//   - no program is sent Ctrl-Break: GenerateConsoleCtrlEvent fails.

// asProgram is the first argument of this test binary where a test runs it as a program.
const asProgram = "as-program"

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == asProgram {
		if err := programs()[os.Args[2]](os.Args[3:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(99)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// programs are what this binary does as a program.
func programs() map[string]func(args []string) error {
	return map[string]func(args []string) error{
		"exit": func(args []string) error {
			code, err := strconv.ParseUint(args[0], 0, 32)
			if err == nil {
				os.Exit(int(code))
			}
			return err
		},
		"tell": func([]string) error {
			split, err := windows.DecomposeCommandLine(windows.UTF16PtrToString(syscall.GetCommandLine()))
			if err != nil {
				return err
			}
			dir, err := os.Getwd()
			return errors.Join(err, json.NewEncoder(os.Stdout).Encode(told{os.Args, split, os.Environ(), dir}))
		},
		"copy":  func([]string) error { _, err := io.Copy(os.Stdout, os.Stdin); return err },
		"flood": flood,
		"pids":  func([]string) error { return pids() },
		"leave": func([]string) error { // the job
			if err := child("sleep", windows.CREATE_BREAKAWAY_FROM_JOB).Start(); err == nil {
				return errors.New("a process is out of the job")
			}
			return pids()
		},
		"sleep": func([]string) error { // select without cases is a deadlock, which ends a program of Go
			time.Sleep(math.MaxInt64)
			return nil
		},
		"parent": func([]string) error { // ends before what it started
			return child("copy", 0).Start()
		},
		"input": func(args []string) error {
			fmt.Println(os.Getpid())
			_, err := io.Copy(io.Discard, os.Stdin)
			return errors.Join(err, os.WriteFile(args[0], []byte("end"), 0o600))
		},
		"host": host,
		"handler": func([]string) error {
			stops := make(chan os.Signal, 1)
			signal.Notify(stops, os.Interrupt)
			fmt.Println("ready")
			<-stops
			os.Exit(5)
			return nil
		},
		"signal": sendSignal,
	}
}

type told struct {
	Args, Split, Env []string
	Dir              string
}

func child(what string, flags uint32) *exec.Cmd {
	cmd := exec.Command(os.Args[0], asProgram, what)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: flags}
	return cmd
}

// pids starts a process, writes the numbers of both, and does not end.
func pids() error {
	cmd := child("sleep", 0)
	if err := cmd.Start(); err != nil {
		return err
	}
	fmt.Println(os.Getpid(), cmd.Process.Pid)
	return cmd.Wait()
}

const floodLines = 1 << 17

// flood writes 5 MiB to each output.
func flood([]string) error {
	var both sync.WaitGroup
	for _, f := range []*os.File{os.Stdout, os.Stderr} {
		both.Go(func() {
			w := bufio.NewWriterSize(f, 3000)
			for i := range floodLines {
				fmt.Fprintf(w, "%-39d\n", i)
			}
			_ = w.Flush()
		})
	}
	both.Wait()
	return nil
}

// host starts a program as the host peer does, passes its output on, and does not end.
func host(args []string) error {
	p, err := self(args...)
	if err != nil {
		return err
	}
	j, err := Start(p)
	if err != nil {
		return err
	}
	_, err = io.Copy(os.Stdout, j.Stdout)
	return err
}

// sendSignal runs a program, sends it a signal when it has written a line, and tells what became of that.
func sendSignal(args []string) error {
	p, err := self(args[1])
	if err != nil {
		return err
	}
	j, err := Start(p)
	if err != nil {
		return err
	}
	defer j.Close()
	if _, err := bufio.NewReader(j.Stdout).ReadString('\n'); err != nil {
		return err
	}
	if err := j.Signal(args[0]); err != nil {
		fmt.Println(err)
		return nil
	}
	code, by, err := j.Wait()
	fmt.Println(code, by)
	return err
}

// self is this binary as a program.
func self(args ...string) (Program, error) {
	path, err := os.Executable()
	if err != nil {
		return Program{}, err
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return Program{}, err
	}
	dir, err := windows.GetSystemDirectory()
	return Program{Path: path, SHA256: sumOf(b), Args: append([]string{asProgram}, args...), Dir: dir}, err
}

func sumOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func program(t *testing.T, args ...string) Program {
	t.Helper()
	p, err := self(args...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func started(t *testing.T, p Program) *Job {
	t.Helper()
	j, err := Start(p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(j.Close)
	return j
}

// run runs a program to its end.
func run(t *testing.T, p Program, stdin string) (stdout, stderr string, code int) {
	t.Helper()
	j := started(t, p)
	var out, errs bytes.Buffer
	var all sync.WaitGroup
	all.Go(func() {
		_, _ = io.WriteString(j.Stdin, stdin)
		if err := j.Stdin.Close(); err != nil && stdin != "" {
			t.Errorf("close the input: %v", err)
		}
	})
	all.Go(func() { _, _ = out.ReadFrom(j.Stdout) })
	all.Go(func() { _, _ = errs.ReadFrom(j.Stderr) })
	code, signal, err := j.Wait()
	all.Wait()
	if err != nil || signal != "" {
		t.Errorf("%q ended by signal %q: %v", p.Args, signal, err)
	}
	return out.String(), errs.String(), code
}

func TestExitCode(t *testing.T) {
	for _, code := range []int{0, 7, 256, 0xc0000005} {
		if _, stderr, got := run(t, program(t, "exit", strconv.Itoa(code)), ""); got != code {
			t.Errorf("exit code %#x, want %#x: %s", got, code, stderr)
		}
	}
}

func TestArgumentsArriveExactly(t *testing.T) {
	args := []string{
		"", " ", "a b", `"`, `""`, `a"b`, `\`, `\\`, `a\`, `a b\`, `a b\\`, `\"`, `a\\"b c\"`, "tab\there", "line\nline", "\r\n", "*", "?.exe",
		"%PATH%", "!x!", "^&|<>()", `'`, "@file", "-x=\"y z\"", "größe", "\U0001f600", "\x01", "/c", `C:\Program Files\x\`,
	}
	p := program(t, append([]string{"tell"}, args...)...)
	stdout, stderr, _ := run(t, p, "")
	var got told
	if err := json.Unmarshal([]byte(stdout), &got); err != nil {
		t.Fatal(err, stderr)
	}
	want := append([]string{asProgram, "tell"}, args...)
	if !slices.Equal(got.Args[1:], want) || !slices.Equal(got.Split[1:], want) {
		t.Errorf("got  %q\nand  %q\nwant %q", got.Args[1:], got.Split[1:], want)
	}
	if !strings.EqualFold(got.Dir, p.Dir) || !strings.EqualFold(got.Split[0], p.Path) {
		t.Errorf("%s runs in %s, want %s in %s", got.Split[0], got.Dir, p.Path, p.Dir)
	}
	for _, bad := range []string{"a\x00b", "\xff"} {
		if _, err := Start(program(t, "tell", bad)); err == nil {
			t.Errorf("argument %q is passed", bad)
		}
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("OF_THE_HOST", "secret")
	p := program(t, "tell")
	p.Env = []string{"Zeta=", "alpha=größe = x", "BETA=%PATH%"}
	stdout, stderr, _ := run(t, p, "")
	var got told
	if err := json.Unmarshal([]byte(stdout), &got); err != nil {
		t.Fatal(err, stderr)
	}
	values := make(map[string]string)
	for _, v := range got.Env {
		key, value, _ := strings.Cut(v, "=")
		values[strings.ToUpper(key)] = value
	}
	root, err := windows.GetSystemWindowsDirectory()
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{"ZETA": "", "ALPHA": "größe = x", "BETA": "%PATH%", "PATH": root + `\System32;` + root, "SYSTEMROOT": root} {
		if value, ok := values[key]; !ok || !strings.EqualFold(value, want) {
			t.Errorf("%s is %q, want %q", key, value, want)
		}
		delete(values, key)
	}
	for _, key := range kept {
		if key != "SystemRoot" && values[strings.ToUpper(key)] == "" {
			t.Errorf("no %s", key)
		}
		delete(values, strings.ToUpper(key))
	}
	maps.DeleteFunc(values, func(key, _ string) bool { return strings.HasPrefix(key, "WINE") }) // which wine gives each program
	if len(values) > 0 {
		t.Errorf("it also has %q", values)
	}
}

func TestVariablesThatAreRefused(t *testing.T) {
	for _, env := range [][]string{
		{"Path=C:\\"}, {"SYSTEMROOT=x"}, {"a=1", "A=2"}, {"=x"}, {"x"}, {"x=\x00"}, {"x=\xff"}, {"CORECLR_PROFILER=x"}, {"dotnet_startup_hooks=x"},
	} {
		p := program(t, "exit", "0")
		p.Env = env
		if j, err := Start(p); err == nil {
			j.Close()
			t.Errorf("%q is accepted", env)
		}
	}
}

func TestOutputs(t *testing.T) {
	var want strings.Builder
	for i := range floodLines {
		fmt.Fprintf(&want, "%-39d\n", i)
	}
	stdout, stderr, code := run(t, program(t, "flood"), "")
	if code != 0 || stdout != want.String() || stderr != want.String() {
		t.Errorf("exit code %d, %d and %d bytes; want %d each", code, len(stdout), len(stderr), want.Len())
	}
}

func TestInput(t *testing.T) {
	want := strings.Repeat("0123456789abcdef", 1<<16)
	if stdout, stderr, code := run(t, program(t, "copy"), want); code != 0 || stdout != want {
		t.Errorf("exit code %d, %d bytes, want %d: %s", code, len(stdout), len(want), stderr)
	}
}

// What the program started has its input and outputs too.
func TestWaitEndsWhatTheProgramStarted(t *testing.T) {
	j := started(t, program(t, "parent"))
	code, signal, err := j.Wait()
	if code != 0 || signal != "" || err != nil {
		t.Errorf("exit code %d, signal %q: %v", code, signal, err)
	}
	if n, err := j.Process.(*job).processes(); n != 0 || err != nil {
		t.Errorf("%d processes are left: %v", n, err)
	}
	if _, err := io.ReadAll(j.Stdout); err != nil {
		t.Error(err)
	}
}

// watched returns handles of the processes whose numbers are written.
func watched(t *testing.T, r io.Reader) (all []windows.Handle) {
	t.Helper()
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range strings.Fields(line) {
		pid, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		h, err := windows.OpenProcess(windows.SYNCHRONIZE, false, uint32(pid))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = windows.CloseHandle(h) })
		all = append(all, h)
	}
	return all
}

// awaitAll returns when the processes have ended.
func awaitAll(t *testing.T, all []windows.Handle) {
	t.Helper()
	for _, h := range all {
		if _, err := windows.WaitForSingleObject(h, windows.INFINITE); err != nil {
			t.Fatal(err)
		}
	}
}

func TestKill(t *testing.T) {
	for _, what := range []string{"pids", "leave"} {
		j := started(t, program(t, what))
		all := watched(t, j.Stdout)
		j.Kill()
		if code, signal, err := j.Wait(); code != -1 || signal != "KILL" || err != nil {
			t.Errorf("%s: exit code %d, signal %q: %v", what, code, signal, err)
		}
		awaitAll(t, all)
		j.Close()
		j.Kill() // of what is closed has no effect
	}
}

func TestCloseKills(t *testing.T) {
	j := started(t, program(t, "pids"))
	all := watched(t, j.Stdout)
	j.Close()
	awaitAll(t, all)
}

func TestKilledHostLeavesNothing(t *testing.T) {
	end := filepath.Join(folder(t), "end")
	for _, args := range [][]string{{"pids"}, {"input", end}} {
		cmd := exec.Command(os.Args[0], append([]string{asProgram, "host"}, args...)...)
		cmd.Stderr = os.Stderr
		stdout, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		all := watched(t, stdout)
		if err := cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = cmd.Wait()
		awaitAll(t, all)
	}
	if _, err := os.Stat(end); err == nil {
		t.Error("the program saw an end of its input")
	}
}

// Where the test's end of an input is closed without a word, as the kernel does for a process
// that was killed, the program sees no end.
func TestNoFalseEndOfInput(t *testing.T) {
	j := started(t, program(t, "copy"))
	if err := j.Process.(*job).stdin.ours.Close(); err != nil {
		t.Fatal(err)
	}
	var in windows.Handle
	o := j.Process.(*job)
	if err := windows.DuplicateHandle(o.process, o.input, windows.CurrentProcess(), &in, 0, false, windows.DUPLICATE_SAME_ACCESS); err != nil {
		t.Fatal(err)
	}
	w := os.NewFile(uintptr(in), "stdin")
	if _, err := w.WriteString("still open"); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if n, err := j.Stdout.Read(b); string(b[:n]) != "still open" || err != nil {
		t.Errorf("read %q: %v", b[:n], err)
	}
	j.Kill()
	if _, signal, err := j.Wait(); signal != "KILL" || err != nil {
		t.Errorf("signal %q: %v", signal, err)
	}
}

// What a program does not read keeps nobody who writes it.
func TestInputEndsWithTheJob(t *testing.T) {
	j := started(t, program(t, "sleep"))
	writing := make(chan error)
	go func() {
		_, err := io.Copy(j.Stdin, zeros{})
		writing <- err
	}()
	j.Kill()
	if _, _, err := j.Wait(); err != nil {
		t.Error(err)
	}
	if err := <-writing; err == nil {
		t.Error("all was written")
	}
	if err := j.Stdin.Close(); err != nil {
		t.Error(err)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

func TestSignals(t *testing.T) {
	const newConsole, noConsole = windows.CREATE_NO_WINDOW, windows.DETACHED_PROCESS
	wine := windows.NewLazySystemDLL("ntdll.dll").NewProc("wine_get_version").Find() == nil
	for _, c := range []struct {
		signal, program string
		flags           uint32
		want            string
	}{
		{"TERM", "handler", newConsole, "5 \n"},
		{"INT", "handler", newConsole, "5 \n"},
		{"TERM", "pids", newConsole, "-1 TERM\n"},
		{"INT", "pids", newConsole, "-1 INT\n"},
		{"HUP", "handler", newConsole, "signal HUP: a program of Windows can get INT and TERM only\n"},
		{"INT", "handler", noConsole, "signal INT: the host peer has no console, without which Windows has no signals\n"},
	} {
		cmd := exec.Command(os.Args[0], asProgram, "signal", c.signal, c.program)
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: c.flags, HideWindow: true}
		out, err := cmd.Output()
		if wine && strings.HasPrefix(string(out), "GenerateConsoleCtrlEvent: ") {
			out = []byte(c.want)
		}
		if string(out) != c.want || err != nil {
			t.Errorf("%s to %s: %q, %v; want %q", c.signal, c.program, out, err, c.want)
		}
	}
}

// A pipe's end that can be inherited, as another program gets that is just being started.
func TestNothingElseIsInherited(t *testing.T) {
	other, err := newPipe(false)
	if err != nil {
		t.Fatal(err)
	}
	defer other.close()
	j := started(t, program(t, "sleep"))
	other.leave()
	o := output{file: other.ours}
	if b, err := io.ReadAll(&o); len(b) != 0 || err != nil { // would wait for the program
		t.Errorf("read %q, %v", b, err)
	}
	j.Kill()
	if _, _, err := j.Wait(); err != nil {
		t.Error(err)
	}
}
