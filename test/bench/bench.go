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

	"github.com/fairlead/fairlead/internal/schedule"
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

func (m measure) eachSize() []int {
	if len(m.sizes) == 0 {
		return []int{0}
	}
	return m.sizes
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
	emit    io.Writer // gets every sample, if not nil
	out     io.Writer // gets the results

	dir   string
	began time.Time

	mu       sync.Mutex
	part     part
	samples  map[sampleKey][]float64
	methods  map[string]string // by mode
	cleanups []func()
	err      error // of out or emit
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
	Values []float64
}

// sampleMark begins each line with a sample.
const sampleMark = "bench-sample: "

func newBench(scale scale, out, log, emit io.Writer) (*bench, error) {
	dir, err := os.MkdirTemp("", "flb-")
	if err != nil {
		return nil, err
	}
	b := &bench{scale: scale, log: log, emit: emit, out: out, dir: dir, began: time.Now()}
	b.program, err = program.Path(dir)
	return b, err
}

func (b *bench) close() error { return errors.Join(b.err, os.RemoveAll(b.dir)) }

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

// add records samples of a measure.
func (b *bench) add(measure, mode string, size int, values ...float64) {
	b.record(sample{sampleKey: sampleKey{measure, mode, size, ""}, Values: values})
}

// extra records a further figure of a measure; the report has the median of all. The
// name has the unit.
func (b *bench) extra(measure, mode string, size int, name string, v float64) {
	b.record(sample{sampleKey: sampleKey{measure, mode, size, name}, Values: []float64{v}})
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
	}
	if len(s.Values) > 0 {
		b.samples[s.sampleKey] = append(b.samples[s.sampleKey], s.Values...)
	}
	if b.emit != nil {
		text, err := json.Marshal(s)
		_, failed := fmt.Fprintf(b.emit, "%s%s\n", sampleMark, text)
		b.err = errors.Join(b.err, err, failed)
	}
}

func (b *bench) write(l line) { b.err = errors.Join(b.err, json.NewEncoder(b.out).Encode(l)) }

// measure runs a part and returns its cells: one that says why, if the part failed.
func (b *bench) measure(ctx context.Context, p part) (cells []cell, err error) {
	b.part, b.samples, b.methods = p, map[sampleKey][]float64{}, map[string]string{}
	began := time.Now()
	err = attempt(func() { p.run(ctx, b) })
	for _, f := range slices.Backward(b.cleanups) {
		f()
	}
	b.cleanups = nil
	b.progress("took %.0f s", time.Since(began).Seconds())
	if cells = b.cells(p); err == nil && len(cells) == 0 {
		err = errors.New("nothing was measured")
	}
	if err != nil {
		brief, _, _ := strings.Cut(err.Error(), "\n")
		cells = []cell{{Part: p.section, Measure: p.name, Failed: p.name + ": " + brief}}
	}
	for _, c := range cells {
		b.write(line{Cell: &c})
	}
	return cells, err
}

// cells makes cells of all samples, in the order in which the part names them.
func (b *bench) cells(p part) (cells []cell) {
	for _, m := range p.measures {
		for _, size := range m.eachSize() {
			for _, mode := range m.modes {
				key := sampleKey{m.name, mode, size, ""}
				if len(b.samples[key]) == 0 {
					continue
				}
				c := cell{
					Part: p.section, Measure: m.name, Mode: mode, Size: float64(size), SizeUnit: m.sizeUnit, Unit: m.unit,
					By: b.methods[mode], dist: summarize(b.samples[key]),
				}
				for k, values := range b.samples {
					if name := k.Extra; name != "" && k == (sampleKey{m.name, mode, size, name}) {
						if c.Extra == nil {
							c.Extra = map[string]float64{}
						}
						c.Extra[name] = summarize(values).Value
					}
				}
				b.progress("%s, %s, %d: %s", m.name, mode, size, value(c.Value, m.unit))
				cells = append(cells, c)
			}
		}
	}
	return cells
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
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		if ended := schedule.Sleep(ctx, 20*time.Millisecond); ended != nil {
			return fmt.Errorf("%w: %w", ended, err)
		}
	}
}
