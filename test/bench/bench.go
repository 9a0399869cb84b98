// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/perf/benchfmt"
	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/program"
)

// measure is one thing that is measured.
type measure struct {
	name  string // of its results
	title string // says from when to when, for example
	unit  string // of the first value; others may come with it
	modes []string
	// sizes are the sizes at which it is measured, in sizeUnit; none if nothing varies.
	sizes    []int
	sizeUnit string
	load     load // of the parts flows and vsock
}

// key is what a result of a measure belongs to.
type key struct {
	name, mode string
	size       int
}

// keys returns what results of the measure may belong to, by size and mode.
func (m measure) keys() (keys []key) {
	sizes := m.sizes
	if len(sizes) == 0 {
		sizes = []int{0}
	}
	for _, size := range sizes {
		for _, mode := range m.modes {
			keys = append(keys, key{nameOf(m.name, mode, size), mode, size})
		}
	}
	return keys
}

// part is a part of the benchmark. To add one, write a function that returns a part,
// name it in parts, and describe its section in report.md. run interleaves the modes, so
// that other load affects them alike, and fails (see check) if any of them did not work:
// then nothing of the part counts.
type part struct {
	name     string
	section  string // of the report
	measures []measure
	run      func(ctx context.Context, b *bench)
}

// parts returns all parts, in the order of the report.
func parts() []part {
	return []part{
		latencyPart(), missedPart(), natPart(), enginePart(), kubePart(), idlePart(), memoryPart(),
		churnPart(), burstPart(), udpPart(), startPart(), binaryPart(), flowsPart(), vsockPart(), tunnelPart(), hookPart(),
	}
}

func measures() (all []measure) {
	for _, p := range parts() {
		all = append(all, p.measures...)
	}
	return all
}

// scale is how much is measured.
type scale int

const (
	full scale = iota
	quick
	tiny // shows that it works; its figures mean nothing
)

var scales = []string{"full", "quick", "tiny"}

// bench is a run. Its methods may be called by several goroutines at a time.
type bench struct {
	program string // the fairlead binary
	scale   scale
	log     io.Writer
	dir     string
	began   time.Time
	machine []benchfmt.Config
	out     *benchfmt.Writer
	results results
	part    part

	// Of the part that is measured.
	mu       sync.Mutex
	samples  map[string]map[string][]float64 // by name of the result and unit
	methods  map[string]string               // by mode
	cleanups []func()
}

// newBench makes a run that writes its results to out, with the properties of the machine
// and of the run; the caller closes it.
func newBench(scale scale, machine []benchfmt.Config, log, out io.Writer) (*bench, error) {
	dir, err := os.MkdirTemp("", "flb-")
	if err != nil {
		return nil, err
	}
	b := &bench{scale: scale, log: log, dir: dir, began: time.Now(), machine: machine, out: benchfmt.NewWriter(out)}
	b.program, err = program.Path(dir)
	return b, err
}

func (b *bench) close() error { return os.RemoveAll(b.dir) }

// of picks a number by the scale.
func (b *bench) of(full, quick, tiny int) int { return [...]int{full, quick, tiny}[b.scale] }

// lasting picks a duration by the scale.
func (b *bench) lasting(full, quick, tiny time.Duration) time.Duration {
	return [...]time.Duration{full, quick, tiny}[b.scale]
}

// sizes returns the sizes to measure: the quick scale has the smallest and the largest,
// the tiny scale the smallest.
func (b *bench) sizes(all []int) []int {
	switch b.scale {
	case quick:
		return []int{all[0], all[len(all)-1]}
	case tiny:
		return all[:1]
	}
	return all
}

// tempDir makes a directory with a path that is short enough for sockets.
func (b *bench) tempDir() string { return must(os.MkdirTemp(b.dir, "")) }

// space makes a network namespace that lives until the part ends.
func (b *bench) space() *netns.Space {
	s := must(netns.New())
	b.cleanup(func() { _ = s.Close() })
	return s
}

// progress logs what is measured next, or how far it is.
func (b *bench) progress(format string, args ...any) {
	_, _ = fmt.Fprintf(b.log, "%6.1fs %s: %s\n", time.Since(b.began).Seconds(), b.part.name, fmt.Sprintf(format, args...))
}

// cleanup calls f when the part ends; the last comes first.
func (b *bench) cleanup(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cleanups = append(b.cleanups, f)
}

// values are samples that belong together, by unit.
type values map[string]float64

func seconds(d time.Duration) values { return values{"sec": d.Seconds()} }

// add records samples of a measure.
func (b *bench) add(measure, mode string, size int, vs ...values) {
	b.mu.Lock()
	defer b.mu.Unlock()
	name := nameOf(measure, mode, size)
	if b.samples[name] == nil {
		b.samples[name] = map[string][]float64{}
	}
	for _, set := range vs {
		for unit, v := range set {
			b.samples[name][unit] = append(b.samples[name][unit], v)
		}
	}
}

// method records which method a mode uses, as the agent reports it.
func (b *bench) method(mode, method string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.methods[mode] = mode + ": " + method
}

// do runs a part and then what it left to clean up.
func (b *bench) do(ctx context.Context, p part) error {
	b.part, b.samples, b.methods = p, map[string]map[string][]float64{}, map[string]string{}
	err := attempt(func() { p.run(ctx, b) })
	for _, f := range slices.Backward(b.cleanups) {
		f()
	}
	b.cleanups = nil
	return err
}

// measure runs a part and keeps its results: one that says why, if the part failed.
func (b *bench) measure(ctx context.Context, p part) error {
	began, before := time.Now(), len(b.results)
	err := b.do(ctx, p)
	b.progress("took %.0f s", time.Since(began).Seconds())
	methods := strings.Join(slices.Sorted(maps.Values(b.methods)), "; ")
	for _, m := range p.measures {
		for _, k := range m.keys() {
			if err == nil && len(b.samples[k.name]) > 0 {
				b.keep(summarize(k.name, m.unit, b.samples[k.name]), "methods", methods)
			}
		}
	}
	if err == nil && len(b.results) == before {
		err = errors.New("nothing was measured")
	}
	if err == nil {
		return nil
	}
	b.results = b.results[:before]
	why, _, _ := strings.Cut(err.Error(), "\n")
	b.keep(&benchfmt.Result{Name: benchfmt.Name(failedName + p.name), Iters: 1, Values: []benchfmt.Value{{Value: 1, Unit: "failures"}}}, "why", why)
	return fmt.Errorf("%s: %w", p.name, err)
}

// keep adds a result to the run, with a property of its own, and writes it.
func (b *bench) keep(r *benchfmt.Result, property, value string) {
	b.progress("%s", line(r))
	r.Config = slices.Clone(b.machine)
	if value != "" {
		r.Config = append(r.Config, benchfmt.Config{Key: property, Value: []byte(value), File: true})
	}
	b.results = append(b.results, r)
	check(b.out.Write(r))
}

// runName is the name of the last result: how long the run took, if it was not interrupted.
const runName = "Run"

// end adds the last result.
func (b *bench) end() {
	b.part = part{name: "end"}
	took := benchfmt.Value{Value: time.Since(b.began).Seconds(), Unit: "sec"}
	b.keep(&benchfmt.Result{Name: benchfmt.Name(runName), Iters: 1, Values: []benchfmt.Value{took}}, "load-after", loadAverage())
}

// inVM measures flows over vsock in an emulated machine.
func inVM(ctx context.Context, b *bench) {
	b.progress("building and booting Linux")
	b.collect(exec.CommandContext(ctx, "go", "-C", "test", "run", "./vm", "-kernel", "6.12",
		"-tags", "vm", "-bench", "^BenchmarkVsock$", "-env", scaleVariable+"="+scales[b.scale],
		"./test/bench"), (*exec.Cmd).Run)
}

// scaleVariable is the scale of what a test in the emulated machine measures.
const scaleVariable = "FAIRLEAD_BENCH_SCALE"

// inEnclave returns a function that runs f with mounts and cgroups of its own, as engines
// need them: in another process, except if this is that process.
func inEnclave(f func(context.Context, *bench)) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		if enclave.Dir() != "" {
			f(ctx, b)
			return
		}
		cmd := exec.CommandContext(ctx, must(os.Executable()), "-out", "-", "-only", b.part.name, "-scale", scales[b.scale])
		cmd.Env = append(os.Environ(), program.Variable+"="+b.program)
		b.collect(cmd, enclave.Run)
	}
}

// The rig of the emulated machine frames lines, and go test adds GOMAXPROCS to names.
var (
	frame = regexp.MustCompile(`(?m)^\[[^]\n]*\] |\r$`)
	procs = regexp.MustCompile(`-\d+$`)
)

// collect runs another process and keeps the results that it writes to standard output.
// run starts it and waits.
func (b *bench) collect(cmd *exec.Cmd, run func(*exec.Cmd) error) {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, b.log
	failed := run(cmd)
	in := benchfmt.NewReader(bytes.NewReader(frame.ReplaceAll(out.Bytes(), nil)), cmd.Path)
	for in.Scan() {
		r, ok := in.Result().(*benchfmt.Result)
		switch {
		case !ok || string(r.Name) == runName:
		case r.GetConfig("why") != "":
			check(errors.New(r.GetConfig("why")))
		default:
			own := r.Clone()
			// Without the properties that were read, by whose places those of this run would be looked up.
			b.keep(&benchfmt.Result{Name: procs.ReplaceAll(own.Name, nil), Iters: own.Iters, Values: own.Values}, "methods", r.GetConfig("methods"))
		}
	}
	if err := errors.Join(failed, in.Err()); err != nil {
		tail := out.Bytes()[max(0, out.Len()-2000):]
		check(fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, tail))
	}
}

// limit is far beyond what any mode needs on a busy machine.
const limit = 2 * time.Minute

// eventually calls f until it succeeds.
func eventually(ctx context.Context, f func() error) error {
	_, err := retry(ctx, 20*time.Millisecond, func() (struct{}, error) { return struct{}{}, f() })
	return err
}

// retry calls f until it succeeds, with pauses between, and returns its value.
func retry[T any](ctx context.Context, pause time.Duration, f func() (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		v, err := f()
		if err == nil {
			return v, nil
		}
		if ended := schedule.Sleep(ctx, pause); ended != nil {
			return v, fmt.Errorf("%w: %w", ended, err)
		}
	}
}

// wait waits until something is seen, and returns when.
type wait func(context.Context) time.Time

// poller is a way to see something by looking now and then.
type poller struct {
	mode  string
	every time.Duration
	look  func() bool
}

// wait looks in intervals, from a random moment on, until it is true.
func (p poller) wait(ctx context.Context) wait {
	var seen time.Time
	ended := make(chan error, 1)
	go func() {
		ended <- attempt(func() {
			check(schedule.Sleep(ctx, rand.N(p.every)))
			for next := time.Now().Add(p.every); !p.look(); next = next.Add(p.every) {
				check(schedule.Sleep(ctx, time.Until(next)))
			}
			seen = time.Now()
		})
	}()
	return func(context.Context) time.Time {
		check(<-ended)
		return seen
	}
}

// seen records when each mode saw what began at a time.
func (b *bench) seen(ctx context.Context, measure string, size int, began time.Time, by map[string]wait) {
	for mode, at := range by {
		b.add(measure, mode, size, seconds(at(ctx).Sub(began)))
	}
}

// failure is what check panics with. A measurement ends at its first error, like a test;
// attempt turns the panic into an error again.
type failure struct{ error }

func check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

// attempt returns the error with which f failed.
func attempt(f func()) (err error) {
	defer func() {
		r := recover()
		failed, ok := r.(failure)
		if r != nil && !ok {
			panic(r)
		}
		err = failed.error
	}()
	f()
	return nil
}

// together calls f for all at the same time, and fails if one of them does.
func together[T any](ctx context.Context, all []T, f func(context.Context, T)) {
	group, ctx := errgroup.WithContext(ctx)
	for _, v := range all {
		group.Go(func() error { return attempt(func() { f(ctx, v) }) })
	}
	check(group.Wait())
}

// inside calls f in a namespace.
func inside(s *netns.Space, f func()) {
	check(s.Do(func() error { return attempt(f) }))
}
