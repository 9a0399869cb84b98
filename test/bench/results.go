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
	median := benchmath.AssumeNothing.Summary(sorted, 0.95)
	add(unit, median.Center)
	if off := max(median.Hi-median.Center, median.Center-median.Lo); !math.IsInf(off, 0) {
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
			add(other, stats.Sample{Xs: samples[other]}.Quantile(0.5))
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

// Config returns a property of the run.
func (r results) Config(key string) string {
	if len(r) == 0 {
		return ""
	}
	return r[len(r)-1].GetConfig(key)
}

// failed returns by part why it was not measured.
func (r results) failed() map[string]string {
	why := map[string]string{}
	for _, res := range r {
		if part, ok := strings.CutPrefix(string(res.Name), failedName); ok {
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

// judge returns what was measured, and whether that meets the target.
func (t target) judge(r results) (v float64, met, ok bool) {
	v, ok = r.figure(t.Figure)
	other, found := r.figure(t.Over + t.Minus)
	switch {
	case t.Over != "":
		v, ok = v/other, ok && found && other != 0
	case t.Minus != "":
		v, ok = v-other, ok && found
	}
	return v, v >= t.AtLeast && (t.AtMost == 0 || v <= t.AtMost), ok
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

func (r results) verdict(targets []target) verdict {
	v := verdict{table: table{Head: []string{"what", "target", "measured", "met"}}}
	for _, t := range targets {
		limit := "≤ " + t.format(t.AtMost)
		if t.AtMost == 0 {
			limit = "≥ " + t.format(t.AtLeast)
		}
		row := []string{t.What, limit, missing, "not measured"}
		if figure, met, ok := t.judge(r); ok {
			row[2], row[3] = t.format(figure), "yes"
			if !met {
				v.Reasons = append(v.Reasons, cmp.Or(t.Why, "Not known yet."))
				row[3] = fmt.Sprintf("**no** (%d)", len(v.Reasons))
			}
		}
		v.Rows = append(v.Rows, row)
	}
	return v
}
