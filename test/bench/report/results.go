// SPDX-License-Identifier: Apache-2.0

// Package report keeps what the benchmark measured as JSON lines, and makes the
// document of it: tables, figures, and what they say in words. It measures
// nothing, and makes the same document of the same lines.
package report

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"time"
)

// Machine is where and when a run was made.
type Machine struct {
	CPU      string    `json:"cpu"`
	CPUs     int       `json:"cpus"`
	MemoryMB int       `json:"memory_mb"`
	Kernel   string    `json:"kernel"`
	Go       string    `json:"go"`
	Commit   string    `json:"commit"` // with "+" where the tree had changes
	Date     time.Time `json:"date"`
	Load     string    `json:"load"`  // averages over 1, 5 and 15 minutes as the run began
	Scale    string    `json:"scale"` // full, quick or tiny
	// Seconds is how long the run took, LoadAfter the averages at its end; a run
	// that was cut short has neither.
	Seconds   float64 `json:"seconds,omitempty"`
	LoadAfter string  `json:"load_after,omitempty"`
}

// Cell is one thing measured: one measure of one mode at one size.
type Cell struct {
	Part    string `json:"part"`
	Measure string `json:"measure"` // "listen() returns → message on the link"
	Mode    string `json:"mode"`    // "bpf", "poll 1 s"; the first of a measure is what others are compared with
	// Size is what was varied, in SizeUnit: 1000 "sockets". Without a unit
	// nothing was varied.
	Size     float64 `json:"size,omitempty"`
	SizeUnit string  `json:"size_unit,omitempty"`
	// Unit is what all figures of the cell are in: "s", "B", "B/s", "%" and the
	// like are scaled for the reader (µs, MB); any other is shown behind the figure.
	Unit string `json:"unit"`
	// By is the mechanism that was in use, as the agent says: "fentry", "poll".
	By string `json:"by,omitempty"`
	// Value is the one figure that was measured, or the median of the samples.
	Value float64 `json:"value"`
	Dist  *Dist   `json:"dist,omitempty"` // where there are samples
	// Extra are more figures of the same measurement, in units that the name says.
	Extra map[string]float64 `json:"extra,omitempty"`
	// Failed says why there is no figure. No ratio is made with such a cell.
	Failed string `json:"failed,omitempty"`
}

// Dist is how samples are distributed.
type Dist struct {
	N   int     `json:"n"`
	Min float64 `json:"min"`
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
	// Quantiles are the values at 0, 1, … 100 percent.
	Quantiles []float64 `json:"quantiles"`
}

// Summarize returns how samples, at least one, are distributed. It sorts them.
// A quantile is the smallest sample that at least that share does not exceed.
func Summarize(samples []float64) *Dist {
	slices.Sort(samples)
	d := &Dist{N: len(samples), Min: samples[0], P50: at(samples, 0.5), P90: at(samples, 0.9), P99: at(samples, 0.99), Max: samples[len(samples)-1]}
	for q := range 101 {
		d.Quantiles = append(d.Quantiles, at(samples, float64(q)/100))
	}
	return d
}

func at(sorted []float64, q float64) float64 {
	i := int(math.Ceil(q*float64(len(sorted))-1e-9)) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}

// OK says that the cell has a figure.
func (c Cell) OK() bool { return c.Failed == "" }

// String names the cell.
func (c Cell) String() string {
	s := c.Part + ": " + c.Measure
	if c.SizeUnit != "" {
		s += ", " + Number(c.Size) + " " + c.SizeUnit
	}
	return s + ", " + c.Mode
}

// Results is a run.
type Results struct {
	Machine Machine
	Cells   []Cell
}

// Cell returns the cell of a measure, and whether it was measured and did not
// fail.
func (r *Results) Cell(part, measure, mode string, size float64) (Cell, bool) {
	for _, c := range r.Cells {
		if c.Part == part && c.Measure == measure && c.Mode == mode && c.Size == size {
			return c, c.OK()
		}
	}
	return Cell{}, false
}

// Failed returns the cells without a figure.
func (r *Results) Failed() (failed []Cell) {
	for _, c := range r.Cells {
		if !c.OK() {
			failed = append(failed, c)
		}
	}
	return failed
}

// line is one line of the file: a machine, which begins a run and ends one, or a cell.
type line struct {
	Machine *Machine `json:"machine,omitempty"`
	Cell    *Cell    `json:"cell,omitempty"`
}

// Sink writes JSON lines.
type Sink struct{ enc *json.Encoder }

// NewSink writes to w.
func NewSink(w io.Writer) *Sink {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return &Sink{e}
}

// Machine says where the run is made; once more at the end, with how long it took.
func (s *Sink) Machine(m Machine) error { return s.enc.Encode(line{Machine: &m}) }

// Cell writes a cell.
func (s *Sink) Cell(c Cell) error { return s.enc.Encode(line{Cell: &c}) }

// Read reads what a Sink wrote.
func Read(r io.Reader) (*Results, error) {
	res := &Results{}
	in := bufio.NewScanner(r)
	in.Buffer(nil, 1<<20)
	for n := 1; in.Scan(); n++ {
		var l line
		if err := json.Unmarshal(in.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		switch {
		case l.Machine != nil:
			res.Machine = *l.Machine
		case l.Cell != nil:
			res.Cells = append(res.Cells, *l.Cell)
		default:
			return nil, fmt.Errorf("line %d: neither a machine nor a cell", n)
		}
	}
	return res, in.Err()
}
