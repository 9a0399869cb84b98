// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/schedule"
)

// stage is where a listen event is on its way from the kernel to the link. Stages but the
// first and the last begin with a call of a function of the agent, where the kernel's tracer
// notes the time: a uprobe, in the program as it is.
type stage struct {
	what string // that was done when it begins
	call string // of the function; empty for the first and the last
}

// module begins the names of the agent's functions.
const module = "github.com/fairlead/fairlead/internal/"

// stages are in the order in which an event passes them.
func stages() []stage {
	return []stage{
		{what: "the kernel changes the socket's state, where the hook runs"},
		{"the agent runs, to read the ring", "observer.(*engine).take"},
		{"the event is read and in the observer's model", "source/socket.(*handler).Apply"},
		{"the owner is known", "registry.(*source).Apply"},
		{"registry: merged, and the reconciler runs", "reconcile.(*Reconciler).apply"},
		{"wanted set: changed, and the sink's worker runs", "reconcile.(*worker).sync"},
		{"sink: the message is made", "sink/hostlink.(*session).write"},
		{"encoded, and the link's writer runs", "link.(*lastWords).Write"},
		{what: "the other end has the message"},
	}
}

// Each program has ports of its own, from 20,000 on.
const (
	portsEach    = 5_000
	mostPrograms = 8
)

// budget measures how long a listen event takes for each stage, with each program in
// turns, and writes a table. programs are name=file, separated by commas; rounds is how many
// listeners are opened with each.
func budget(ctx context.Context, programs string, rounds int, log, out io.Writer) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("the benchmark makes network namespaces: run it as root")
	}
	all := strings.Split(programs, ",")
	if rounds < 1 || rounds >= portsEach || len(all) > mostPrograms {
		return fmt.Errorf("-budget: %d listeners with each of %d programs: want 1 to %d with %d at most", rounds, len(all), portsEach-1, mostPrograms)
	}
	b := &bench{scale: full, log: log, began: time.Now()}
	if b.dir, err = os.MkdirTemp("", "flb-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	var names []string
	var samples [][][]time.Duration // of each program and stage
	p := part{"budget", "", nil, func(ctx context.Context, b *bench) {
		var probed []*budgeted
		for _, p := range all {
			name, file, ok := strings.Cut(p, "=")
			if !ok {
				check(fmt.Errorf("-budget %q: want name=file of the program", p))
			}
			names = append(names, name)
			probed = append(probed, newBudgeted(ctx, b, file, len(probed)))
		}
		for i := range rounds {
			for j := range probed { // in another order each time
				probed[(i+j)%len(probed)].sample(ctx)
			}
		}
		for _, p := range probed {
			samples = append(samples, p.stages())
			p.guest.check(ctx)
		}
	}}
	if err := b.do(ctx, p); err != nil {
		return err
	}
	return writeBudget(out, names, samples)
}

// writeBudget writes the table: for each stage how long it was since the one before, and the
// whole, each as median and 99th percentile in microseconds.
func writeBudget(out io.Writer, names []string, samples [][][]time.Duration) error {
	var t strings.Builder
	t.WriteString("| step ends when |")
	for _, n := range names {
		fmt.Fprintf(&t, " %s: p50 | p99 |", n)
	}
	t.WriteString("\n|---|" + strings.Repeat("--:|--:|", len(names)) + "\n")
	row := func(what string, of func(program int) []time.Duration) {
		fmt.Fprintf(&t, "| %s |", what)
		for i := range names {
			d := slices.Sorted(slices.Values(of(i)))
			fmt.Fprintf(&t, " %d µs | %d µs |", d[len(d)/2].Microseconds(), d[len(d)*99/100].Microseconds())
		}
		t.WriteByte('\n')
	}
	for s, st := range stages()[1:] {
		row(st.what, func(i int) []time.Duration { return samples[i][s] })
	}
	row("**all**", func(i int) []time.Duration { return samples[i][len(samples[i])-1] })
	fmt.Fprintf(&t, "\n%d listeners with each program.\n", len(samples[0][0]))
	_, err := io.WriteString(out, t.String())
	return err
}

// budgeted is a guest whose agent is traced.
type budgeted struct {
	guest  *guest
	trace  *tracer
	port   uint16 // of the last sample
	rounds []arrival
}

// arrival is when a message about a port came, by CLOCK_MONOTONIC.
type arrival struct {
	port uint16
	at   time.Duration
}

// newBudgeted starts an agent from a copy of a program, as probes are in a file and so in
// every process of it.
func newBudgeted(ctx context.Context, b *bench, file string, index int) *budgeted {
	program := filepath.Join(b.tempDir(), "fairlead")
	check(os.WriteFile(program, must(os.ReadFile(file)), 0o755))
	g := &budgeted{trace: must(newTracer(program, fmt.Sprintf("fairlead_%d_%d", os.Getpid(), index))), port: uint16(20_000 + portsEach*index)}
	b.cleanup(func() {
		if err := g.trace.close(); err != nil {
			b.progress("%v", err)
		}
	})
	g.guest = b.newGuest(modes[0], b.space())
	g.guest.program = program
	g.guest.start()
	g.guest.connect(ctx)
	return g
}

// sample opens a listener and closes it.
func (g *budgeted) sample(ctx context.Context) {
	g.port++
	k := tcpKey(g.port)
	pause := func() { check(schedule.Sleep(ctx, 5*time.Millisecond+rand.N(10*time.Millisecond))) }
	pause()
	wait := g.guest.peer.expect(k, "")
	fd, _ := g.guest.open(k)
	at := wait(ctx)
	// The clock of the trace, which has no other form in Go.
	g.rounds = append(g.rounds, arrival{g.port, monotonic() - time.Since(at)})
	pause()
	wait = g.guest.peer.expectGone(k)
	_ = unix.Close(fd)
	wait(ctx)
}

func monotonic() time.Duration {
	var ts unix.Timespec
	check(unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))
	return time.Duration(ts.Nano())
}

// stages returns the durations of all samples by stage, and of the whole as the last.
func (g *budgeted) stages() [][]time.Duration {
	hits := must(g.trace.read())
	all := make([][]time.Duration, len(stages()))
	for _, a := range g.rounds {
		times := passed(hits, a)
		if times == nil {
			continue // the trace has lost a part
		}
		for i := range times[1:] {
			all[i] = append(all[i], times[i+1]-times[i])
		}
		all[len(all)-1] = append(all[len(all)-1], a.at-times[0])
	}
	if len(all[0]) < len(g.rounds)/2 {
		check(fmt.Errorf("only %d of %d listeners can be followed in the trace", len(all[0]), len(g.rounds)))
	}
	return all
}

// hit is a line of the trace.
type hit struct {
	stage int
	port  uint16 // of the first stage
	at    time.Duration
}

// passed returns when one listen event was at each stage: the last time before it was at
// the next one. It returns nil if the trace does not tell.
func passed(hits []hit, a arrival) []time.Duration {
	times := make([]time.Duration, len(stages()))
	next := len(times) - 1
	times[next] = a.at
	next--
	for _, h := range slices.Backward(hits) {
		switch {
		case h.stage == 0 && h.port == a.port:
			times[0] = h.at
		case h.stage == next && h.stage > 0 && h.at <= times[next+1]:
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
