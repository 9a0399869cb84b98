// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	_ "embed"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/aclements/go-moremath/stats"
	"github.com/goccy/go-yaml"
	"golang.org/x/perf/benchfmt"
	"golang.org/x/perf/benchmath"
)

// results are a run, or several: a result for each measure, mode and size. Its iterations
// are the number of samples, its values their median, and p99, maximum and margin of error
// where there are enough samples.
type results []*benchfmt.Result

// Prefixes of the unit of what a result has besides the median.
const (
	p99    = "p99-"
	most   = "max-"
	margin = "margin-" // how far the median may be off, with a confidence of 95 %
)

// enoughForP99 is the number of samples below which the p99 would be the maximum.
const enoughForP99 = 100

// runKey is the property by which results of several runs in one file differ.
const runKey = "run"

// failedName begins the name of a result that says why a part has none.
const failedName = "Failed/"

// nameOf returns the name of a result. The size is 0 where nothing varies.
func nameOf(measure, mode string, size int) string {
	name := measure + "/mode=" + mode
	if size != 0 {
		name += fmt.Sprintf("/size=%d", size)
	}
	return name
}

// summarize makes a result of samples by unit. The distribution is that of the first unit.
func summarize(name, unit string, samples map[string][]float64) *benchfmt.Result {
	r := &benchfmt.Result{Name: benchfmt.Name(name), Iters: len(samples[unit])}
	add := func(unit string, v float64) {
		v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 6, 64), 64) // the rest would be noise
		r.Values = append(r.Values, benchfmt.Value{Value: v, Unit: unit})
	}
	sorted := benchmath.NewSample(samples[unit], &benchmath.DefaultThresholds)
	middle := benchmath.AssumeNothing.Summary(sorted, 0.95)
	add(unit, middle.Center)
	if off := max(middle.Hi-middle.Center, middle.Center-middle.Lo); !math.IsInf(off, 0) {
		add(margin+unit, off)
	}
	all := stats.Sample{Xs: sorted.Values, Sorted: true}
	if r.Iters >= enoughForP99 {
		add(p99+unit, all.Quantile(0.99))
	}
	if r.Iters > 1 {
		add(most+unit, all.Quantile(1))
	}
	for _, other := range slices.Sorted(maps.Keys(samples)) {
		if other != unit {
			add(other, median(samples[other]))
		}
	}
	return r
}

// find returns the result with a name, nil if there is none.
func (r results) find(name string) *benchfmt.Result {
	i := slices.IndexFunc(r, func(res *benchfmt.Result) bool { return string(res.Name) == name })
	if i < 0 {
		return nil
	}
	return r[i]
}

// of returns the results of a measure, by size and mode.
func (r results) of(m measure) (out results) {
	for _, k := range m.keys() {
		if res := r.find(k.name); res != nil {
			out = append(out, res)
		}
	}
	return out
}

// byRun splits results by the run that they are of.
func (r results) byRun() (runs []results) {
	for i, res := range r {
		if i == 0 || res.GetConfig(runKey) != r[i-1].GetConfig(runKey) {
			runs = append(runs, nil)
		}
		runs[len(runs)-1] = append(runs[len(runs)-1], res)
	}
	return runs
}

// medians makes one run of several: of each value it has the median of all runs, and of
// maxima the highest.
func (r results) medians() (out results) {
	runs := r.byRun()
	if len(runs) < 2 {
		return r
	}
	for _, res := range r {
		if out.find(string(res.Name)) != nil {
			continue
		}
		one, values := res.Clone(), map[string][]float64{}
		one.Iters, one.Values = 0, nil
		var units []string
		for _, run := range runs {
			same := run.find(string(res.Name))
			if same == nil {
				continue
			}
			one.Iters += same.Iters
			for _, v := range same.Values {
				if values[v.Unit] == nil {
					units = append(units, v.Unit)
				}
				values[v.Unit] = append(values[v.Unit], v.Value)
			}
		}
		for _, unit := range units {
			v := median(values[unit])
			if prefix, _ := cutUnit(unit); prefix == most {
				v = slices.Max(values[unit])
			}
			one.Values = append(one.Values, benchfmt.Value{Value: v, Unit: unit})
		}
		out = append(out, one)
	}
	return out
}

func median(vs []float64) float64 { return stats.Sample{Xs: vs}.Quantile(0.5) }

// Config returns a property of the run; of several runs all values that differ.
func (r results) Config(key string) string {
	var all []string
	for _, run := range r.byRun() {
		if v := run[len(run)-1].GetConfig(key); v != "" && !slices.Contains(all, v) {
			all = append(all, v)
		}
	}
	return strings.Join(all, "; ")
}

// failed returns by part why it was not measured, in which run if there are several.
func (r results) failed() map[string]string {
	why := map[string]string{}
	for _, res := range r {
		if part, ok := strings.CutPrefix(string(res.Name), failedName); ok {
			if n := res.GetConfig(runKey); n != "" {
				part += ", run " + n
			}
			why[part] = res.GetConfig("why")
		}
	}
	return why
}

func readResults(name string) (r results, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	in := benchfmt.NewReader(f, name)
	for in.Scan() {
		switch rec := in.Result().(type) {
		case *benchfmt.Result:
			r = append(r, rec.Clone())
		case *benchfmt.SyntaxError:
			return nil, rec
		}
	}
	return r, in.Err()
}

//go:embed targets.yaml
var targetsFile []byte

// target is a figure to reach. A figure is the name of a result and a unit, separated by
// a space.
type target struct {
	What   string
	Figure string
	// The figure may be relative to another one.
	Over, Minus string
	AtMost      float64 `yaml:"at most"`
	AtLeast     float64 `yaml:"at least"`
	Why         string  // it is missed
}

func targets() (all []target, err error) {
	return all, yaml.UnmarshalWithOptions(targetsFile, &all, yaml.Strict())
}

// figure returns a figure, if it was measured.
func (r results) figure(f string) (float64, bool) {
	name, unit, _ := strings.Cut(f, " ")
	if res := r.find(name); res != nil {
		return res.Value(unit)
	}
	return 0, false
}

// measured returns what each run that measured it has for the target.
func (t target) measured(r results) (vs []float64) {
	for _, run := range r.byRun() {
		v, ok := run.figure(t.Figure)
		other, found := run.figure(t.Over + t.Minus)
		switch {
		case t.Over != "":
			v, ok = v/other, ok && found && other != 0
		case t.Minus != "":
			v, ok = v-other, ok && found
		}
		if ok {
			vs = append(vs, v)
		}
	}
	return vs
}

func (t target) met(v float64) bool { return v >= t.AtLeast && (t.AtMost == 0 || v <= t.AtMost) }

func (t target) limit() string {
	if t.AtMost == 0 {
		return "≥ " + t.format(t.AtLeast)
	}
	return "≤ " + t.format(t.AtMost)
}

// format writes a figure of the target, which has no unit if it is a ratio.
func (t target) format(v float64) string {
	_, unit, _ := strings.Cut(t.Figure, " ")
	if t.Over != "" {
		unit = "×"
	}
	return value(v, unit)
}

// verdict is the table of targets, and why some were missed, by the numbers in it.
type verdict struct {
	table
	Reasons []string
}

// verdict compares the medians of all runs with the targets, and shows what an earlier
// version had, if there is one.
func (r results) verdict(targets []target, before results) verdict {
	runs := len(r.byRun())
	v := verdict{table: table{Head: []string{"what", "target"}}}
	column := func(shown bool, head ...string) {
		if shown {
			v.Head = append(v.Head, head...)
		}
	}
	column(len(before) > 0, "before")
	column(runs < 2, "measured")
	column(runs > 1, fmt.Sprintf("median of %d runs", runs), "lowest", "highest")
	column(true, "met")
	for _, t := range targets {
		row := []string{t.What, t.limit()}
		show := func(vs []float64, of func([]float64) float64) {
			if len(vs) == 0 {
				row = append(row, missing)
				return
			}
			row = append(row, t.format(of(vs)))
		}
		if len(before) > 0 {
			show(t.measured(before), median)
		}
		vs := t.measured(r)
		show(vs, median)
		if runs > 1 {
			show(vs, slices.Min)
			show(vs, slices.Max)
		}
		switch {
		case len(vs) == 0:
			row = append(row, "not measured")
		case t.met(median(vs)):
			row = append(row, "yes")
		default:
			v.Reasons = append(v.Reasons, cmp.Or(t.Why, "Not known yet."))
			row = append(row, fmt.Sprintf("**no** (%d)", len(v.Reasons)))
		}
		v.Rows = append(v.Rows, row)
	}
	return v
}
