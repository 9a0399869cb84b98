// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fairlead/fairlead/test/bench/report"
)

// Scale is how much is measured.
type Scale int

// The scales: tiny shows that all of it works, and its figures mean nothing.
const (
	Full Scale = iota
	Quick
	Tiny
)

func (s Scale) String() string { return [...]string{"full", "quick", "tiny"}[s] }

// Env is what a part measures with. It is used by one goroutine at a time.
type Env struct {
	Program string // the fairlead binary
	Scale   Scale
	Log     io.Writer // for lines of progress

	part  string
	dir   string
	dirs  int
	begun time.Time
	put   func(report.Cell) error
	err   error // of put
}

// Of picks a number by the scale.
func (e *Env) Of(full, quick, tiny int) int { return [...]int{full, quick, tiny}[e.Scale] }

// For picks a duration by the scale.
func (e *Env) For(full, quick, tiny time.Duration) time.Duration {
	return [...]time.Duration{full, quick, tiny}[e.Scale]
}

// Dir makes a directory of its own, with a path short enough for sockets. It
// goes with the run.
func (e *Env) Dir() (string, error) {
	e.dirs++
	dir := filepath.Join(e.dir, fmt.Sprint(e.dirs))
	return dir, os.MkdirAll(dir, 0o700)
}

// Progress says what is measured next, or how far it is.
func (e *Env) Progress(format string, args ...any) {
	_, _ = fmt.Fprintf(e.Log, "%6.1fs %s: %s\n", time.Since(e.begun).Seconds(), e.part, fmt.Sprintf(format, args...))
}

// Samples records a cell with its samples, which are in the cell's unit. None at
// all is a failure of the cell.
func (e *Env) Samples(c report.Cell, samples []float64) {
	if len(samples) == 0 {
		e.Fail(c, fmt.Errorf("no samples"))
		return
	}
	c.Dist = report.Summarize(samples)
	c.Value = c.Dist.P50
	e.record(c)
}

// Value records a cell with one figure.
func (e *Env) Value(c report.Cell, v float64) {
	c.Value = v
	e.record(c)
}

// Fail records that a cell has no figure. The run goes on, and ends with an error.
func (e *Env) Fail(c report.Cell, err error) {
	c.Failed = strings.ReplaceAll(err.Error(), "\n", "; ")
	e.record(c)
}

func (e *Env) record(c report.Cell) {
	c.Part = e.part
	if c.OK() {
		what := report.Value(c.Value, c.Unit)
		if c.Dist != nil {
			what = fmt.Sprintf("%s (n %d, p99 %s)", what, c.Dist.N, report.Value(c.Dist.P99, c.Unit))
		}
		e.Progress("%s: %s", strings.TrimPrefix(c.String(), c.Part+": "), what)
	} else {
		e.Progress("%s: FAILED: %s", strings.TrimPrefix(c.String(), c.Part+": "), c.Failed)
	}
	if err := e.put(c); err != nil && e.err == nil {
		e.err = err
	}
}

// Seconds turns durations into samples of unit "s".
func Seconds(ds []time.Duration) []float64 {
	out := make([]float64, len(ds))
	for i, d := range ds {
		out[i] = d.Seconds()
	}
	return out
}

// pause waits, unless ctx ends before.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// eventually tries f for up to two minutes: a busy machine may take long.
func eventually(ctx context.Context, f func() error) (err error) {
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if err = f(); err == nil || ctx.Err() != nil || time.Now().After(end) {
			return err
		}
	}
}
