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
	"regexp"
	"slices"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/test/kit/netns"
)

// What the caller's namespace is to the observer.
const (
	hookUnwatched = "another namespace"
	hookBurst     = "observed, in a burst"
	hookIdle      = "observed, idle"
)

// pair is what a program does, and pays for.
type pair struct {
	name string
	// do does it once, and returns the CPU time of the thread. ln is a listener at
	// another port.
	do func(port, ln int) time.Duration
	// tool is a program that is run instead.
	tool []string
}

var pairs = []pair{
	{name: "listen() and close()", do: listenClose},
	{name: "TCP bind() and close()", do: func(port, _ int) time.Duration { return bindClose(unix.SOCK_STREAM, port) }},
	{name: "UDP bind() and close()", do: func(port, _ int) time.Duration { return bindClose(unix.SOCK_DGRAM, port) }},
	{name: "connect() and accept()", do: connectAccept},
	{name: "nft", tool: []string{"nft", "add table ip bench; delete table ip bench"}},
	{name: "iptables", tool: []string{"iptables", "-w", "-t", "nat", "-F", "OUTPUT"}},
}

func addedTo(what string) string        { return "added to " + what }
func insidePrograms(what string) string { return "within BPF programs, " + what }

func (p pair) modes() []string {
	if p.tool != nil {
		return []string{hookUnwatched, hookIdle}
	}
	return []string{hookUnwatched, hookBurst, hookIdle}
}

func hookPart() part {
	var added, inside []measure
	for i, p := range pairs {
		m := measure{name: addedTo(p.name), unit: "s", modes: p.modes()}
		if i == 0 {
			m.figure = figure{"hook-listen", bars}
		}
		added = append(added, m)
		if p.tool == nil {
			inside = append(inside, measure{name: insidePrograms(p.name), unit: "s", modes: p.modes()})
		}
	}
	return part{"hook", "hook", append(added, inside...), hooks}
}

// hooks measures turns with an observer and turns without it. The speed of a processor
// changes by more than an observer costs from one second to the next, so the observer
// runs in this process, where it can start and stop in a tenth of a second, and each
// turn is compared with those before and after.
func hooks(ctx context.Context, b *bench) {
	watched, other := must(netns.New()), must(netns.New())
	b.cleanup(func() { _, _ = watched.Close(), other.Close() })
	h := &hookTurns{b: b, in: map[string]*netns.Space{hookUnwatched: other, hookBurst: watched, hookIdle: watched}, types: new(kernel.Types)}
	before := h.turn()
	rounds, lossy := b.of(100, 40, 1), 0
	for range rounds {
		var with map[sampleKey]time.Duration
		lost := h.observed(ctx, watched, func() {
			with = h.turn()
			h.programs()
		})
		after := h.turn()
		if lost > 0 { // this turn does not count
			lossy++
		} else {
			for k, d := range with {
				b.add(k.Measure, k.Mode, 0, (d - (before[k]+after[k])/2).Seconds())
			}
		}
		before = after
	}
	if 10*lossy > rounds {
		check(fmt.Errorf("the observer lost events in %d of %d turns", lossy, rounds))
	}
}

type hookTurns struct {
	b     *bench
	in    map[string]*netns.Space // by mode
	types *kernel.Types
}

// turn measures all pairs in all modes.
func (h *hookTurns) turn() map[sampleKey]time.Duration {
	out := map[sampleKey]time.Duration{}
	for _, p := range pairs {
		for _, mode := range p.modes() {
			out[sampleKey{Measure: addedTo(p.name), Mode: mode}] = h.repeat(p, mode)
		}
	}
	return out
}

// programs measures the time within BPF programs, which itself costs time.
func (h *hookTurns) programs() {
	for _, p := range pairs {
		for _, mode := range p.modes() {
			if p.tool == nil {
				spent := programTime(func() { h.repeat(p, mode) })
				h.b.add(insidePrograms(p.name), mode, 0, spent.Seconds()/float64(h.times(p, mode)))
			}
		}
	}
}

// times is how often a turn repeats a pair.
func (h *hookTurns) times(p pair, mode string) int {
	switch {
	case p.tool != nil:
		return 1
	case mode == hookIdle:
		return h.b.of(80, 80, 10)
	}
	return h.b.of(400, 400, 20)
}

// idleWait is so long that the observer sleeps again.
const idleWait = 300 * time.Microsecond

// repeat returns the tenth percentile, because any other load only adds time.
func (h *hookTurns) repeat(p pair, mode string) time.Duration {
	var spent []time.Duration
	inside(h.in[mode], func() {
		const port = 20_000
		ln, _ := openSocket(tcpKey(port))
		defer func() { _ = unix.Close(ln) }()
		for i := range h.times(p, mode) {
			// Without a sleep, because a cold cache is not the observer's cost.
			for until := time.Now().Add(idleWait); mode == hookIdle && time.Now().Before(until); {
				continue
			}
			spent = append(spent, p.once(port+1+i, ln))
		}
	})
	slices.Sort(spent)
	return spent[len(spent)/10]
}

func (p pair) once(port, ln int) time.Duration {
	if p.tool == nil {
		return p.do(port, ln)
	}
	cmd := exec.Command(p.tool[0], p.tool[1:]...)
	if out, err := cmd.CombinedOutput(); err != nil {
		check(fmt.Errorf("%s: %w: %s", p.name, err, out))
	}
	return cmd.ProcessState.SystemTime() + cmd.ProcessState.UserTime()
}

// threadTime is the CPU time of the calling thread.
func threadTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano())
}

func loopback(port int) *unix.SockaddrInet4 {
	return &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}
}

func tcpSocket() int {
	return must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
}

func listenClose(port, _ int) time.Duration {
	fd := tcpSocket()
	err := unix.Bind(fd, loopback(port))
	began := threadTime()
	err = errors.Join(err, unix.Listen(fd, 1), unix.Close(fd))
	took := threadTime() - began
	check(err)
	return took
}

func bindClose(kind, port int) time.Duration {
	fd := must(unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0))
	began := threadTime()
	err := errors.Join(unix.Bind(fd, loopback(port)), unix.Close(fd))
	took := threadTime() - began
	check(err)
	return took
}

func connectAccept(_, ln int) time.Duration {
	at, fd := must(unix.Getsockname(ln)), tcpSocket()
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // leaves no TIME_WAIT
	began := threadTime()
	check(unix.Connect(fd, at))
	in, _, err := unix.Accept4(ln, unix.SOCK_CLOEXEC)
	check(err)
	err = errors.Join(unix.Close(fd), unix.Close(in))
	took := threadTime() - began
	check(err)
	return took
}

// observed runs f while a namespace is observed by events, and returns how many were
// lost.
func (h *hookTurns) observed(ctx context.Context, in *netns.Space, f func()) (lost uint64) {
	o := must(observer.New(observer.Options{Mode: observer.BPF, Types: h.types}))
	ctx, cancel := context.WithCancel(ctx)
	live, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- in.Do(func() error { return o.Run(ctx, deaf{live}) }) }()
	err := attempt(func() {
		select {
		case <-live:
			check(schedule.Sleep(ctx, 100*time.Millisecond)) // until it sleeps
		case err := <-done:
			done <- err
			check(errors.Join(errors.New("the observer has ended"), err))
		}
		for _, m := range o.Methods() {
			if m.Capability == observer.TCPListen {
				h.b.method(hookUnwatched, m.Name)
			}
		}
		f()
	})
	cancel()
	check(errors.Join(err, <-done))
	return o.Stats().Drops
}

// deaf is a handler that only notes that the observer runs.
type deaf struct{ live chan struct{} }

func (d deaf) Replace([]observer.Socket) {
	select {
	case <-d.live: // again, after a loss
	default:
		close(d.live)
	}
}

func (deaf) Methods([]kernel.Method) {}
func (deaf) Apply([]observer.Event)  {}
func (deaf) Stale(error)             {}

// programTime is how long the BPF programs of this process ran during f. The kernel
// counts it only while asked to.
func programTime(f func()) time.Duration {
	const bpfEnableStats = 32        // enum bpf_cmd
	attr := struct{ kind uint32 }{0} // BPF_STATS_RUN_TIME
	fd, _, errno := unix.Syscall(unix.SYS_BPF, bpfEnableStats, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if errno != 0 {
		check(fmt.Errorf("count the time of BPF programs: %w", errno))
	}
	defer func() { _ = unix.Close(int(fd)) }()
	before := programsRan()
	f()
	return programsRan() - before
}

var runTime = regexp.MustCompile(`run_time_ns:\s*(\d+)`)

// programsRan sums the run time of each BPF program that this process holds.
func programsRan() (ran time.Duration) {
	programs := 0
	for _, info := range must(filepath.Glob("/proc/self/fdinfo/*")) {
		text, _ := os.ReadFile(info) // empty if it was closed meanwhile
		if m := runTime.FindSubmatch(text); m != nil {
			ran += time.Duration(must(strconv.ParseInt(string(m[1]), 10, 64)))
			programs++
		}
	}
	if programs == 0 {
		check(errors.New("the observer holds no BPF program"))
	}
	return ran
}
