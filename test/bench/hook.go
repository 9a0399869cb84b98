// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/bench/report"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// The modes of the part hook: what the caller's namespace is to the agent.
const (
	hookDetached  = "no agent"
	hookUnwatched = "another namespace"
	hookIdle      = "watched, idle"
	hookBurst     = "watched, in a burst"
)

func hookPart() Part {
	return Part{
		Section: report.Section{
			Name: "hook", Title: "What a program pays for being observed",
			About: `The processor time of the calling thread for a pair of system calls, beyond what the same pair
takes while nobody observes. What counts of a turn
is the time that its best tenth does not exceed, as whatever else the machine does only adds to it;
a sample is the difference of two turns. *Another namespace* is a container that is not
observed, and *in a burst* the pairs follow each other without a pause: for these two the observer alone runs within the
benchmark, is switched on and off for each sample, and its turn is compared with those before and after, as a
processor's speed changes from second to second by more than what is measured. *Idle* means that an agent
sleeps and is woken by each call; a turn is compared with one before the agent was started, some seconds apart. The time within the BPF programs is counted by the kernel itself
(BPF_ENABLE_STATS), of all that a pair needs: a listener is bound before. What it takes to enter the
programs is not in it. The calls of nft
and iptables are those of the whole program, from its start to its end.`,
			Base: hookUnwatched,
			Figures: []report.Figure{
				{File: "hook-listen", Title: "Added to listen() and close()", Measure: addedTo(pairs[0].name), Kind: report.Bars, Y: "time"},
			},
		},
		Run: hooks,
	}
}

func addedTo(what string) string { return "added to " + what }

const inPrograms = "within BPF programs, "

// pair is what a server or a client does.
type pair struct {
	name string
	// do runs it once and returns the time of the thread that it took.
	do func(port int) (time.Duration, error)
}

var pairs = []pair{
	{"listen() and close()", listenClose},
	{"TCP bind() and close()", func(port int) (time.Duration, error) { return bindClose(unix.SOCK_STREAM, port) }},
	{"UDP bind() and close()", func(port int) (time.Duration, error) { return bindClose(unix.SOCK_DGRAM, port) }},
}

// threadTime is what the calling thread has run.
func threadTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano())
}

func loopback(port int) *unix.SockaddrInet4 {
	return &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}
}

func listenClose(port int) (time.Duration, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	err = unix.Bind(fd, loopback(port))
	began := threadTime()
	return ended(began, errors.Join(err, unix.Listen(fd, 1), unix.Close(fd)))
}

func bindClose(kind, port int) (time.Duration, error) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	began := threadTime()
	return ended(began, errors.Join(unix.Bind(fd, loopback(port)), unix.Close(fd)))
}

func ended(began time.Duration, err error) (time.Duration, error) { return threadTime() - began, err }

// connectAccept has a listener of its own, which does not count.
func connectAccept(port int) (time.Duration, error) {
	ln, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Close(ln) }()
	if err := errors.Join(unix.Bind(ln, loopback(port)), unix.Listen(ln, 8)); err != nil {
		return 0, err
	}
	var spent []time.Duration
	for range 20 {
		d, err := connectOnce(ln, port)
		if err != nil {
			return 0, err
		}
		spent = append(spent, d)
	}
	return low(spent), nil
}

func connectOnce(ln, port int) (time.Duration, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // leaves no TIME_WAIT
	began := threadTime()
	if err := unix.Connect(fd, loopback(port)); err != nil {
		return 0, errors.Join(err, unix.Close(fd))
	}
	in, _, err := unix.Accept4(ln, unix.SOCK_CLOEXEC)
	if err != nil {
		return 0, errors.Join(err, unix.Close(fd))
	}
	return ended(began, errors.Join(unix.Close(fd), unix.Close(in)))
}

// low is what the best tenth of the runs does not exceed: what others do on the
// machine only ever adds to it.
func low(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/10]
}

// quiet is how long the caller waits before each pair, so that the agent sleeps
// again. It does not sleep itself: what a cold cache costs is not the agent's.
const quiet = 300 * time.Microsecond

// repeat runs a pair n times in a namespace and returns the time that it takes.
func repeat(in *netns.Space, p pair, n int, wait time.Duration) (time.Duration, error) {
	spent := make([]time.Duration, 0, n)
	err := in.Do(func() error {
		for i := range n {
			for until := time.Now().Add(wait); wait > 0 && time.Now().Before(until); {
				runtime.KeepAlive(until)
			}
			d, err := p.do(20_000 + i%1000)
			if err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			spent = append(spent, d)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return low(spent), nil
}

// hookCase is one pair, or program, in one mode.
type hookCase struct {
	pair
	n     int
	calls bool // a program is called: a pause changes nothing
}

func hooks(ctx context.Context, e *Env) error {
	watched, err := netns.New()
	if err != nil {
		return err
	}
	defer func() { _ = watched.Close() }()
	var cases, turns []hookCase
	for _, p := range pairs {
		cases = append(cases, hookCase{pair: p, n: e.Of(1500, 800, 20)})
		turns = append(turns, hookCase{pair: p, n: e.Of(400, 400, 20)})
	}
	connects := pair{"connect() and accept()", connectAccept}
	cases = append(cases, hookCase{pair: connects, n: e.Of(60, 40, 2)})
	turns = append(turns, hookCase{pair: connects, n: e.Of(10, 10, 2)})
	if err := hookTurns(ctx, e, turns); err != nil {
		return err
	}
	for _, argv := range [][]string{
		{"nft", "add table ip bench; delete table ip bench"},
		{"iptables", "-w", "-t", "nat", "-F", "OUTPUT"},
	} {
		cases = append(cases, hookCase{pair: pair{argv[0], func(int) (time.Duration, error) { return call(ctx, argv) }}, n: e.Of(8, 5, 1), calls: true})
	}
	samples := map[[2]string][]float64{}
	inside := map[[2]string][]float64{}
	by := ""
	rounds := e.Of(24, 10, 1)
	for r := range rounds {
		e.Progress("round %d of %d", r+1, rounds)
		base := map[[2]string]time.Duration{}
		for _, c := range cases {
			for mode, wait := range map[string]time.Duration{hookUnwatched: 0, hookIdle: quiet} {
				if !c.compared(mode) {
					continue
				}
				if base[[2]string{c.name, mode}], err = repeat(watched, c.pair, c.count(mode), wait); err != nil {
					return err
				}
			}
		}
		dir, err := e.Dir()
		if err != nil {
			return err
		}
		g, err := newGuest(e.Program, filepath.Join(dir, "g"), modes[0])
		if err != nil {
			return err
		}
		by, err = g.ready(ctx)
		if err == nil {
			err = pause(ctx, 3*time.Second) // what the start left to do
		}
		if err == nil {
			err = hookRound(g, watched, cases, base, samples, inside)
		}
		if err == nil {
			err = g.check(ctx)
		}
		g.close()
		if err != nil {
			return err
		}
	}
	for _, c := range cases {
		for _, mode := range []string{hookUnwatched, hookIdle, hookBurst} {
			key := [2]string{c.name, mode}
			if len(samples[key]) > 0 {
				e.Samples(report.Cell{Measure: addedTo(c.name), Mode: mode, Unit: "s", By: by}, samples[key])
			}
			if len(inside[key]) > 0 {
				e.Samples(report.Cell{Measure: inPrograms + c.name, Mode: mode, Unit: "s", By: by}, inside[key])
			}
		}
	}
	return nil
}

// compared reports whether a mode is compared with what was before the agent was
// started; hookTurns measures the rest.
func (c hookCase) compared(mode string) bool { return c.calls || mode == hookIdle }

func (c hookCase) count(mode string) int {
	if mode == hookIdle && !c.calls {
		return max(c.n/5, 1)
	}
	return c.n
}

// hookRound measures all cases while an agent runs.
func hookRound(g *guest, other *netns.Space, cases []hookCase, base map[[2]string]time.Duration, samples, inside map[[2]string][]float64) error {
	type where struct {
		mode string
		in   *netns.Space
		wait time.Duration
	}
	for _, w := range []where{
		{hookUnwatched, other, 0},
		{hookIdle, g.space, quiet},
		{hookBurst, g.space, 0},
	} {
		for _, c := range cases {
			if c.calls && w.mode == hookBurst {
				continue
			}
			key := [2]string{c.name, w.mode}
			if c.compared(w.mode) {
				d, err := repeat(w.in, c.pair, c.count(w.mode), w.wait)
				if err != nil {
					return err
				}
				samples[key] = append(samples[key], (d - base[key]).Seconds())
			}
			if c.calls {
				continue
			}
			spent, err := programTime(g.agent.Process.Pid, func() error {
				_, err := repeat(w.in, c.pair, c.count(w.mode), w.wait)
				return err
			})
			if err != nil {
				return err
			}
			n := c.count(w.mode)
			if c.name == "connect() and accept()" {
				n *= 20
			}
			inside[key] = append(inside[key], spent.Seconds()/float64(n))
		}
	}
	return nil
}

// call runs a program and returns the processor time that it took.
func call(ctx context.Context, argv []string) (time.Duration, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("%s: %w: %s", argv[0], err, out)
	}
	return cmd.ProcessState.SystemTime() + cmd.ProcessState.UserTime(), nil
}

// programTime is how long the BPF programs of a process ran while f did. The
// kernel counts it only for as long as somebody asks.
func programTime(pid int, f func() error) (time.Duration, error) {
	const bpfEnableStats = 32 // enum bpf_cmd
	attr := struct{ kind uint32 }{0 /* BPF_STATS_RUN_TIME */}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, bpfEnableStats, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if errno != 0 {
		return 0, fmt.Errorf("count the time of BPF programs: %w", errno)
	}
	defer func() { _ = unix.Close(int(fd)) }()
	before, err := programsRan(pid)
	if err != nil {
		return 0, err
	}
	if err := f(); err != nil {
		return 0, err
	}
	after, err := programsRan(pid)
	return after - before, err
}

// programsRan sums what the kernel tells of each BPF program that a process holds.
func programsRan(pid int) (ran time.Duration, err error) {
	infos, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	if err != nil {
		return 0, err
	}
	programs := 0
	for _, info := range infos {
		b, err := os.ReadFile(info)
		if err != nil {
			continue // closed meanwhile
		}
		for line := range strings.Lines(string(b)) {
			if v, ok := strings.CutPrefix(line, "run_time_ns:"); ok {
				n, err := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
				if err != nil {
					return 0, fmt.Errorf("%s: %w", info, err)
				}
				ran += time.Duration(n)
				programs++
			}
		}
	}
	if programs == 0 {
		return 0, fmt.Errorf("the agent holds no BPF program")
	}
	return ran, nil
}
