// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package bench

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/test/kit/program"
)

// steps are the functions of the agent that a listen event passes, and what ends when each is
// called. The first step begins when the kernel changes the socket's state, the last ends when the
// message is at the other end of the link.
var steps = []struct{ name, call string }{
	{"agent-runs", "guest/observer.(*engine).take"},
	{"event-read", "guest/source/socket.(*handler).Apply"},
	{"owner-known", "guest/registry.(*source).Apply"},
	{"merged", "guest/reconcile.(*Reconciler).apply"},
	{"wanted", "link/replica.(*Session).try"},
	{"encoded", "link.(*control).Try"},
	{"arrived", ""},
}

// BenchmarkBudget follows listen events through the agent, which is not stripped: the kernel's tracer
// notes when it calls the functions at which steps begin. Each of these probes adds about 3 µs.
func BenchmarkBudget(b *testing.B) {
	file := filepath.Join(b.TempDir(), "fairlead") // a probe is in all processes of a file
	check(b, program.Build("fairlead", file))
	b.Setenv(program.Variable, file)
	trace := newTracer(b, file)
	g := linked(b)
	samples := make([][]time.Duration, len(steps)+1)
	n := of(300, 5)
	at := make(map[int]time.Duration) // when the message about a port came
	for p := firstPort; p < firstPort+n; p++ {
		pause()
		wait := g.peer.expect(key(p), false)
		fd, _ := g.open(p)
		came := wait(b)
		at[p] = monotonic() - time.Since(came)
		pause()
		_ = unix.Close(fd)
	}
	hits := trace.read(b)
	for p, came := range at {
		if times := passed(hits, p, came); times != nil {
			for i := range steps {
				samples[i] = append(samples[i], times[i+1]-times[i])
			}
			samples[len(steps)] = append(samples[len(steps)], came-times[0])
		}
	}
	if got := len(samples[0]); got < n/2 {
		b.Fatalf("only %d of %d listeners can be followed in the trace", got, n)
	}
	for i, d := range samples {
		name := "all"
		if i < len(steps) {
			name = fmt.Sprintf("%d-%s", i+1, steps[i].name)
		}
		b.Run(name, func(b *testing.B) {
			metrics(b, map[string]float64{"p50-sec": quantile(d, 0.5).Seconds(), "p99-sec": quantile(d, 0.99).Seconds()})
		})
	}
}

// monotonic is the clock of the trace, which has no other form in Go.
func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// hit is a line of the trace: that the kernel let a port listen (step 0), or that step ended.
type hit struct {
	step, port int
	at         time.Duration
}

// passed returns when one listen event was at each step: the last time before it was at the next
// one; nil if the trace does not tell.
func passed(hits []hit, port int, came time.Duration) []time.Duration {
	times := make([]time.Duration, len(steps)+1)
	next := len(steps)
	times[next] = came
	next--
	for _, h := range slices.Backward(hits) {
		switch {
		case h.step == 0 && h.port == port:
			times[0] = h.at
		case h.step == next && h.step > 0 && h.at <= times[next+1]:
			times[next] = h.at
			next--
		}
	}
	if next > 0 || times[0] == 0 || times[2] < times[0] {
		return nil
	}
	times[1] = max(times[0], times[1]) // the reader may be awake, for the bind before
	return times
}

// tracer is an instance of the kernel's tracer. It mounts nothing that others see.
type tracer struct {
	root int // of the tracer's file system
	name string
}

// newTracer puts a probe at the call of each step.
func newTracer(b *testing.B, file string) *tracer {
	t := &tracer{root: openTracefs(b), name: fmt.Sprint("fairlead_", os.Getpid())}
	check(b, unix.Mkdirat(t.root, "instances/"+t.name, 0o700))
	b.Cleanup(func() {
		err := unix.Unlinkat(t.root, "instances/"+t.name, unix.AT_REMOVEDIR)
		if err = errors.Join(err, t.write("uprobe_events", "-:"+t.name+"/"), unix.Close(t.root)); err != nil {
			b.Error(err)
		}
	})
	offsets := functions(b, file)
	for i, s := range steps[:len(steps)-1] {
		at, ok := offsets["github.com/fairlead/fairlead/internal/"+s.call]
		if !ok {
			b.Fatalf("the agent has no function %s: correct the steps", s.call)
		}
		check(b, t.write("uprobe_events", fmt.Sprintf("p:%s/s%d %s:%#x", t.name, i+1, file, at)))
	}
	for _, s := range [][2]string{
		{"trace_clock", "mono"},
		{"buffer_size_kb", "4096"},
		{"events/sock/inet_sock_set_state/filter", "newstate == 10"}, // TCP_LISTEN
		{"events/sock/inet_sock_set_state/enable", "1"},
		{"events/" + t.name + "/enable", "1"},
	} {
		check(b, t.write("instances/"+t.name+"/"+s[0], s[1]))
	}
	return t
}

func openTracefs(b *testing.B) int {
	fs := must(unix.Fsopen("tracefs", unix.FSOPEN_CLOEXEC))(b)
	defer func() { _ = unix.Close(fs) }()
	check(b, unix.FsconfigCreate(fs))
	return must(unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0))(b)
}

// functions returns where functions begin in the file of a program.
func functions(b *testing.B, file string) map[string]uint64 {
	f := must(elf.Open(file))(b)
	defer func() { _ = f.Close() }()
	at := make(map[string]uint64)
	for _, s := range must(f.Symbols())(b) {
		for _, p := range f.Progs {
			if p.Type == elf.PT_LOAD && s.Value >= p.Vaddr && s.Value < p.Vaddr+p.Filesz && elf.ST_TYPE(s.Info) == elf.STT_FUNC {
				at[s.Name] = s.Value - p.Vaddr + p.Off
			}
		}
	}
	return at
}

func (t *tracer) write(file, text string) error {
	fd, err := unix.Openat(t.root, file, unix.O_WRONLY|unix.O_CLOEXEC|unix.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if _, err := unix.Write(fd, []byte(text+"\n")); err != nil {
		return fmt.Errorf("%s: write %q: %w", file, text, err)
	}
	return nil
}

var hitLine = regexp.MustCompile(`(?m) (\d+)\.(\d{6}): (?:s(\d+)|inet_sock_set_state): (?:.* sport=(\d+))?`)

// read returns what was traced, in order of time.
func (t *tracer) read(b *testing.B) []hit {
	fd := must(unix.Openat(t.root, "instances/"+t.name+"/trace", unix.O_RDONLY|unix.O_CLOEXEC, 0))(b)
	f := os.NewFile(uintptr(fd), "trace")
	defer func() { _ = f.Close() }()
	var text strings.Builder
	must(f.WriteTo(&text))(b)
	return parseHits(text.String())
}

func parseHits(text string) (hits []hit) {
	for _, m := range hitLine.FindAllStringSubmatch(text, -1) {
		number := func(i int) int { n, _ := strconv.Atoi(m[i]); return n } // all digits, or empty
		hits = append(hits, hit{number(3), number(4), time.Duration(number(1))*time.Second + time.Duration(number(2))*time.Microsecond})
	}
	slices.SortStableFunc(hits, func(a, b hit) int { return int(a.at - b.at) })
	return hits
}

// Of two listeners, the reader was awake when the first began to listen, and something else was
// sent while the second was on its way.
func TestEventIsFollowedThroughTheTrace(t *testing.T) {
	var trace strings.Builder
	line := func(second, us int, event string) {
		fmt.Fprintf(&trace, "        fairlead-200     [001] ..... %d.%06d: %s\n", second, us, event)
	}
	listens := "inet_sock_set_state: family=AF_INET protocol=IPPROTO_TCP sport=%d dport=0 oldstate=TCP_CLOSE newstate=TCP_LISTEN"
	line(10, 100, fmt.Sprintf(listens, 20_001))
	line(10, 90, "s1: (0x4d10)")
	for i := 2; i < len(steps); i++ {
		line(10, 100+10*i, fmt.Sprintf("s%d: (0x4d20)", i))
	}
	line(10, 300, "s1: (0x4d10)")
	line(11, 0, fmt.Sprintf(listens, 20_002))
	line(11, 5, fmt.Sprintf("s%d: (0x4d20)", len(steps)-1)) // of an earlier event
	for i := 1; i < len(steps); i++ {
		line(11, 10*i, fmt.Sprintf("s%d: (0x4d20)", i))
	}
	hits := parseHits(trace.String())
	us := func(begin time.Duration, at ...int) (d []time.Duration) {
		for _, n := range at {
			d = append(d, begin+time.Duration(n)*time.Microsecond)
		}
		return d
	}
	first, second := []int{100, 100}, []int{0, 10} // the steps of both events, in µs
	for i := 2; i < len(steps); i++ {
		first, second = append(first, 100+10*i), append(second, 10*i)
	}
	for _, c := range []struct {
		port int
		came time.Duration
		want []time.Duration
	}{
		{20_001, us(10*time.Second, 200)[0], us(10*time.Second, append(first, 200)...)},
		{20_002, us(11*time.Second, 100)[0], us(11*time.Second, append(second, 100)...)},
		{20_003, us(12*time.Second, 100)[0], nil}, // the kernel's event was lost
		{20_002, us(11*time.Second, 15)[0], nil},  // what there is comes after the message
	} {
		if got := passed(hits, c.port, c.came); !slices.Equal(got, c.want) {
			t.Errorf("port %d: %v, want %v", c.port, got, c.want)
		}
	}
}
