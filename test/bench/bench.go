// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/netns"
	"github.com/fairlead/fairlead/test/kit/program"
)

// measure is one thing that is measured.
type measure struct {
	name  string // says from when to when, for example
	unit  string // "s", "B" and "B/s" are scaled for the reader, any other is shown as it is
	modes []string
	// sizes are the sizes at which it is measured, in sizeUnit; none if nothing varies.
	sizes    []int
	sizeUnit string
	figure   string // file name of the figure that shows it, without ".svg"; none if empty
}

// keys returns what samples of the measure may belong to, by size and mode.
func (m measure) keys() (keys []sampleKey) {
	sizes := m.sizes
	if len(sizes) == 0 {
		sizes = []int{0}
	}
	for _, size := range sizes {
		for _, mode := range m.modes {
			keys = append(keys, sampleKey{Measure: m.name, Mode: mode, Size: size})
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
		latencyPart(), missedPart(), natPart(), enginePart(), kubePart(), idlePart(),
		churnPart(), burstPart(), udpPart(), startPart(), binaryPart(), flowsPart(), vsockPart(), hookPart(),
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
	emit    io.Writer // gets every sample

	dir   string
	began time.Time

	mu       sync.Mutex
	part     part
	samples  map[sampleKey][]float64
	methods  map[string]string // by mode
	cleanups []func()
}

// sampleKey says what a sample belongs to. With extra it is a further figure.
type sampleKey struct {
	Measure string
	Mode    string
	Size    int    `json:",omitempty"`
	Extra   string `json:",omitempty"`
}

// sample is a sample, or the method of a mode, on its way from another process.
type sample struct {
	sampleKey
	Method string `json:",omitempty"`
	Value  float64
}

// sampleMark begins each line with a sample.
const sampleMark = "bench-sample: "

// newBench makes a run; the caller closes it.
func newBench(scale scale, log, emit io.Writer) (*bench, error) {
	dir, err := os.MkdirTemp("", "flb-")
	if err != nil {
		return nil, err
	}
	b := &bench{scale: scale, log: log, emit: emit, dir: dir, began: time.Now()}
	b.samples, b.methods = map[sampleKey][]float64{}, map[string]string{}
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

// add records a sample of a measure.
func (b *bench) add(measure, mode string, size int, v float64) {
	b.extra(measure, mode, size, "", v)
}

// extra records a further figure of a measure; the report has the median of all. The
// name has the unit.
func (b *bench) extra(measure, mode string, size int, name string, v float64) {
	b.record(sample{sampleKey: sampleKey{measure, mode, size, name}, Value: v})
}

// method records which method a mode uses, as the agent reports it.
func (b *bench) method(mode, method string) {
	b.record(sample{sampleKey: sampleKey{Mode: mode}, Method: method})
}

func (b *bench) record(s sample) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.Method != "" {
		b.methods[s.Mode] = s.Method
	} else {
		b.samples[s.sampleKey] = append(b.samples[s.sampleKey], s.Value)
	}
	text, _ := json.Marshal(s) // it has no infinity
	_, _ = fmt.Fprintf(b.emit, "%s%s\n", sampleMark, text)
}

// measure runs a part and returns its cells: one that says why, if the part failed.
func (b *bench) measure(ctx context.Context, p part) ([]cell, error) {
	b.part = p
	began := time.Now()
	err := attempt(func() { p.run(ctx, b) })
	for _, f := range slices.Backward(b.cleanups) {
		f()
	}
	b.cleanups = nil
	b.progress("took %.0f s", time.Since(began).Seconds())
	cells := b.cells(p)
	if err == nil && len(cells) == 0 {
		err = errors.New("nothing was measured")
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", p.name, err)
		brief, _, _ := strings.Cut(err.Error(), "\n")
		return []cell{{Part: p.section, Measure: p.name, Failed: brief}}, err
	}
	return cells, nil
}

// cells makes cells of all samples, in the order in which the part names them.
func (b *bench) cells(p part) (cells []cell) {
	for _, m := range p.measures {
		for _, k := range m.keys() {
			if len(b.samples[k]) == 0 {
				continue
			}
			c := cell{
				Part: p.section, Measure: m.name, Mode: k.Mode, Size: float64(k.Size), SizeUnit: m.sizeUnit, Unit: m.unit,
				By: b.methods[k.Mode], dist: summarize(b.samples[k]), Extra: map[string]float64{},
			}
			for other, values := range b.samples {
				if name := other.Extra; name != "" && other == (sampleKey{k.Measure, k.Mode, k.Size, name}) {
					c.Extra[name] = summarize(values).Value
				}
			}
			b.progress("%s, %s, %d: %s", m.name, k.Mode, k.Size, value(c.Value, m.unit))
			cells = append(cells, c)
		}
	}
	return cells
}

// inVM measures flows over vsock in an emulated machine.
func inVM(ctx context.Context, b *bench) {
	b.progress("building and booting Linux")
	b.collect(exec.CommandContext(ctx, "go", "run", "github.com/fairlead/fairlead/test/vm", "-kernel", "6.12",
		"-tags", "vm,bench", "-run", "^TestMeasureVsock$", "-env", scaleVariable+"="+scales[b.scale],
		"github.com/fairlead/fairlead/test/bench"), (*exec.Cmd).Run)
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
		cmd := exec.CommandContext(ctx, must(os.Executable()), "-emit", "-only", b.part.name, "-scale", scales[b.scale])
		cmd.Env = append(os.Environ(), program.Variable+"="+b.program)
		b.collect(cmd, enclave.Run)
	}
}

// collect runs another process and records the samples that it writes to standard
// output. run starts it and waits.
func (b *bench) collect(cmd *exec.Cmd, run func(*exec.Cmd) error) {
	out, in := io.Pipe()
	cmd.Stdout, cmd.Stderr = in, b.log
	ended := make(chan error, 1)
	go func() {
		err := run(cmd)
		_ = in.Close()
		ended <- err
	}()
	var others []string
	for scan := bufio.NewScanner(out); scan.Scan(); {
		_, text, ok := strings.Cut(scan.Text(), sampleMark) // the emulated machine writes a prefix
		var s sample
		if ok && json.Unmarshal([]byte(text), &s) == nil {
			b.record(s)
		} else {
			others = append(others, scan.Text())
		}
	}
	if err := <-ended; err != nil {
		check(fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, strings.Join(others[max(0, len(others)-20):], "\n")))
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
