// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// job is one run of one test binary in the guest.
type job struct {
	name string // of its package, as reported
	dir  string // in the guest, holds the binary "run.test"
	args []string
	env  []string // NAME=value
}

// guestLimit is how long tests in the guest wait for what must come: an emulated
// machine that shares its processor is some tens of times slower.
const guestLimit = "10m"

// Lines on the guest's second serial port that begin with mark are the run script's.
const mark = "\x1e"

// script is the guest's run script for these jobs.
func script(k kernel, jobs []job) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "export %s=%s %s=%s\n", kernels.Variable, quote(k.release), wait.Variable, guestLimit)
	for i, j := range jobs {
		fmt.Fprintf(&b, "echo; echo '%sbegin %d'; cd %s;", mark, i, quote(j.dir))
		for _, e := range j.env {
			name, value, _ := strings.Cut(e, "=")
			fmt.Fprintf(&b, " %s=%s", name, quote(value))
		}
		b.WriteString(" ./run.test")
		for _, a := range j.args {
			b.WriteString(" " + quote(a))
		}
		fmt.Fprintf(&b, "; rc=$?; echo; echo \"%send %d $rc\"\n", mark, i)
	}
	fmt.Fprintf(&b, "echo; echo '%sdone'\n", mark)
	return b.Bytes()
}

// quote makes s one word for a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// complaint matches what a kernel prints on its console when something is wrong with it.
var complaint = regexp.MustCompile(strings.Join([]string{
	`\bBUG: `, `\bOops\b`, `kernel BUG at`, `\bWARNING: .* at `, `Kernel panic`, `Call Trace:`,
	`general protection fault`, `unable to handle`, `segfault at`, `invoked oom-killer`, `Out of memory`,
	`INFO: task .* blocked`, `unregister_netdevice: waiting`, `Initramfs unpacking failed`,
}, "|"))

// console watches the kernel's console.
type console struct {
	live io.Writer // gets every line, if not nil

	mu        sync.Mutex
	complaint string   // the first one
	lines     []string // from the complaint on, or else the last ones
}

const (
	consoleShown = 120 // lines kept from the first complaint on
	consoleTail  = 20  // lines kept for a machine that ends too early
)

// read consumes the console until the machine closes it.
func (c *console) read(r io.Reader) {
	lines := bufio.NewReader(r)
	for {
		text, err := lines.ReadString('\n')
		if text = strings.TrimRight(text, "\r\n"); text != "" {
			c.line(text)
		}
		if err != nil {
			return
		}
	}
}

func (c *console) line(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.complaint == "" && complaint.MatchString(text) {
		c.complaint, c.lines = text, nil
	}
	switch {
	case c.complaint == "":
		c.lines = append(c.lines, text)
		c.lines = c.lines[max(0, len(c.lines)-consoleTail):]
	case len(c.lines) < consoleShown:
		c.lines = append(c.lines, text)
	}
	if c.live != nil {
		fmt.Fprintf(c.live, "console: %s\n", text)
	}
}

// err returns the kernel's first complaint with what followed it, if there is one.
func (c *console) err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.complaint == "" {
		return nil
	}
	return fmt.Errorf("the kernel complained: %s\n%s", c.complaint, c.text())
}

// last returns the last lines.
func (c *console) last() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.text()
}

func (c *console) text() string {
	var b strings.Builder
	for _, line := range c.lines {
		fmt.Fprintf(&b, "console: %s\n", line)
	}
	return b.String()
}

// machine is one emulated computer that runs jobs and powers off.
type machine struct {
	kernel  kernel
	initrd  string // path of the whole initramfs
	system  string // of systems, empty to run the jobs without one
	cgroup  string // how cgroups are mounted, without a system
	disk    string // path of its file system, which is not changed
	memory  int    // MiB
	cpus    int
	accel   accelerator
	timeout time.Duration
	jobs    []job
	report  *reporter
	console *console
}

// run boots the machine and runs its jobs. The machine itself is one check: it came
// up, ran everything, and its kernel did not complain.
func (m *machine) run(ctx context.Context) {
	start := time.Now()
	err := m.boot(ctx)
	err = errors.Join(err, m.console.err())
	name, release := m.kernel.version+"/machine-"+m.accel.name, "Linux-"+m.kernel.release
	if m.system != "" {
		name += "-" + m.system
	}
	if m.cgroup != "" {
		name += "-" + m.cgroup
	}
	m.report.matrix.machine(m.kernel, err)
	m.report.text(name, release, m.accel.why)
	m.report.check(name, release, time.Since(start), err)
}

func (m *machine) boot(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, m.timeout, fmt.Errorf("machine still runs after %s: killed", m.timeout))
	defer cancel()
	dir, err := os.MkdirTemp("", "fairlead-vm-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	var ports [2]*net.UnixListener
	for i := range ports {
		ports[i], err = net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: filepath.Join(dir, "ttyS"+strconv.Itoa(i))})
		if err != nil {
			return err
		}
		defer ports[i].Close()
	}
	arch := m.kernel.arch
	// The timer check and the watchdogs look at a clock that emulation on a
	// busy host stretches.
	args := []string{
		"-accel", m.accel.options, "-cpu", m.accel.cpu, "-smp", strconv.Itoa(m.cpus), "-m", strconv.Itoa(m.memory),
		"-nodefaults", "-display", "none", "-no-reboot", "-monitor", "none",
		"-chardev", "socket,id=tty0,path=" + filepath.Join(dir, "ttyS0"), "-serial", "chardev:tty0",
		"-chardev", "socket,id=tty1,path=" + filepath.Join(dir, "ttyS1"),
		"-kernel", filepath.Join(m.kernel.dir, "vmlinuz"), "-initrd", m.initrd,
		"-append", "console=" + arch.console + " fairlead.port=" + arch.tests + " fairlead.cgroup=" + m.cgroup + " loglevel=5 panic=-1 oops=panic rdinit=/init tsc=reliable mitigations=off" +
			" random.trust_cpu=on no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1" + m.parameters(),
	}
	args = slices.Concat(args, arch.board, arch.port)
	if m.disk != "" {
		args = append(args, "-drive", "file="+m.disk+",if=none,id=disk,format=raw,snapshot=on", "-device", "nvme,drive=disk,serial=1")
	}
	qemu := exec.CommandContext(ctx, arch.qemu, args...)
	var stderr bytes.Buffer
	qemu.Stdout, qemu.Stderr = &stderr, &stderr
	qemu.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := qemu.Start(); err != nil {
		return fmt.Errorf("start machine: %w: run hack/provision.sh %s", err, arch.provision)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- qemu.Wait()
		for _, p := range ports {
			p.Close() // ends Accept of a machine that never connected
		}
	}()

	var consoleDone sync.WaitGroup
	consoleDone.Go(func() {
		if conn, err := ports[0].Accept(); err == nil {
			m.console.read(conn)
			conn.Close()
		}
	})
	var got results
	conn, err := ports[1].Accept()
	if err == nil {
		got, err = m.read(ctx, conn)
		err = errors.Join(err, conn.Close())
	} else {
		err = nil // the exit below is the better error
	}
	exit := <-ended
	consoleDone.Wait()
	if cause := context.Cause(ctx); cause != nil {
		exit = cause
	}
	if !got.ended {
		exit = errors.Join(exit, errors.New("ended before the jobs did"))
	}
	for _, j := range m.jobs[got.jobs:] {
		m.report.check(m.kernel.version+"/"+j.name, "all", 0, errors.New("did not run"))
	}
	if exit != nil && m.console.err() == nil {
		exit = fmt.Errorf("%w\n%s%s", exit, stderr.String(), m.console.last())
	}
	return errors.Join(err, exit)
}

// parameters are those of the kernel that depend on the system.
func (m *machine) parameters() string {
	if m.system == "" {
		return ""
	}
	return " fairlead.system=" + m.system + " systemd.show_status=0 net.ifnames=0"
}

// results is how far the jobs came.
type results struct {
	jobs  int  // that were reported, the last perhaps only in part
	ended bool // all ran to their end
}

// read reports what the jobs print, until the machine ends.
func (m *machine) read(ctx context.Context, port io.Reader) (got results, err error) {
	lines := bufio.NewReader(port)
	var running *converter
	defer func() {
		if running != nil {
			_, cerr := running.close()
			err = errors.Join(err, cerr)
		}
	}()
	for {
		line, rerr := lines.ReadString('\n')
		if text, ok := strings.CutPrefix(line, mark); ok {
			var word string
			var index, rc int
			_, _ = fmt.Sscan(text, &word, &index, &rc) // begin has two fields; a broken word is caught below
			switch {
			case word == "begin" && running == nil && index == got.jobs && index < len(m.jobs):
				if running, err = m.convert(ctx, m.jobs[index].name); err != nil {
					return got, err
				}
				got.jobs++
			case word == "end" && running != nil && index == got.jobs-1:
				failed, err := running.close()
				running = nil
				if err != nil {
					return got, err
				}
				if rc != 0 && !failed {
					m.report.check(m.kernel.version+"/"+m.jobs[index].name, "exit", 0, fmt.Errorf("exit status %d", rc))
				}
			case word == "done" && running == nil && got.jobs == len(m.jobs):
				got.ended = true
			default:
				return got, fmt.Errorf("unexpected line from the run script: %q", text)
			}
		} else if running != nil {
			if _, err := io.WriteString(running.in, line); err != nil {
				return got, fmt.Errorf("convert output: %w", err)
			}
		}
		if rerr != nil {
			return got, nil // the end of the machine, whose reason is its exit
		}
	}
}

// converter turns the output of one test binary to events and reports them.
type converter struct {
	in   io.WriteCloser
	cmd  *exec.Cmd
	done chan struct{}

	// From here on valid once done is closed.
	failed bool
	err    error
}

func (m *machine) convert(ctx context.Context, name string) (*converter, error) {
	cmd := exec.CommandContext(ctx, "go", "tool", "test2json", "-t", "-p", m.kernel.version+"/"+name)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start test2json: %w", err)
	}
	c := &converter{in: in, cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.failed, c.err = m.report.copy(out)
	}()
	return c, nil
}

// close waits for the end of the events, and returns whether any is a failure.
func (c *converter) close() (failed bool, err error) {
	err = c.in.Close()
	<-c.done
	return c.failed, errors.Join(err, c.err, c.cmd.Wait())
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
