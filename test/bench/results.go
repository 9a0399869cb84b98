// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"time"

	"github.com/aclements/go-moremath/stats"
	"golang.org/x/perf/benchmath"
)

// machine is where and when a run was made.
type machine struct {
	CPU      string    `json:"cpu"`
	CPUs     int       `json:"cpus"`
	MemoryMB int       `json:"memory_mb"`
	Kernel   string    `json:"kernel"`
	Go       string    `json:"go"`
	Commit   string    `json:"commit"` // with "+" if the tree had changes
	Date     time.Time `json:"date"`
	Load     string    `json:"load"`  // averages over 1, 5 and 15 minutes at the start
	Scale    string    `json:"scale"` // full, quick or tiny
	// Seconds and LoadAfter are missing if the run was interrupted.
	Seconds   float64 `json:"seconds,omitempty"`
	LoadAfter string  `json:"load_after,omitempty"`
}

// cell is one measure in one mode at one size.
type cell struct {
	Part     string  `json:"part"`
	Measure  string  `json:"measure"`
	Mode     string  `json:"mode"`
	Size     float64 `json:"size,omitempty"`
	SizeUnit string  `json:"size_unit,omitempty"`
	Unit     string  `json:"unit"`
	By       string  `json:"by,omitempty"` // the method in use, as the agent reports it
	dist
	// Extra holds further figures of the same measurement; the name has the unit.
	Extra  map[string]float64 `json:"extra,omitempty"`
	Failed string             `json:"failed,omitempty"` // why there is no figure
}

// dist is a distribution of samples.
type dist struct {
	N     int     `json:"n"`
	Value float64 `json:"value"` // the median
	P99   float64 `json:"p99"`
	Max   float64 `json:"max"`
	// Margin is how far the median may be off, with a confidence of 95 %; 0 if there are
	// too few samples to tell.
	Margin float64 `json:"margin,omitempty"`
}

// summarize needs at least one sample.
func summarize(samples []float64) dist {
	sorted := benchmath.NewSample(samples, &benchmath.DefaultThresholds)
	median := benchmath.AssumeNothing.Summary(sorted, 0.95)
	all := stats.Sample{Xs: sorted.Values, Sorted: true}
	d := dist{N: len(samples), Value: median.Center, P99: all.Quantile(0.99), Max: all.Quantile(1)}
	if margin := max(median.Hi-median.Center, median.Center-median.Lo); !math.IsInf(margin, 0) {
		d.Margin = margin
	}
	return d
}

// results is a run.
type results struct {
	machine machine
	cells   []cell
}

// find returns the cell of a measure, if it was measured.
func (r *results) find(k sampleKey) (cell, bool) {
	for _, c := range r.cells {
		if k == (sampleKey{Measure: c.Measure, Mode: c.Mode, Size: int(c.Size)}) && c.Failed == "" {
			return c, true
		}
	}
	return cell{}, false
}

// failed returns the cells that say why something was not measured.
func (r *results) failed() []cell {
	return slices.DeleteFunc(slices.Clone(r.cells), func(c cell) bool { return c.Failed == "" })
}

// line is one line of the results file.
type line struct {
	Machine *machine `json:"machine,omitempty"`
	Cell    *cell    `json:"cell,omitempty"`
}

func (r *results) write(name string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	out := json.NewEncoder(f)
	err = out.Encode(line{Machine: &r.machine})
	for _, c := range r.cells {
		err = errors.Join(err, out.Encode(line{Cell: &c}))
	}
	return errors.Join(err, f.Close())
}

func readResults(name string) (*results, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	res := &results{}
	for in := json.NewDecoder(f); in.More(); {
		var l line
		if err := in.Decode(&l); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if l.Machine != nil {
			res.machine = *l.Machine
		}
		if l.Cell != nil {
			res.cells = append(res.cells, *l.Cell)
		}
	}
	return res, nil
}
