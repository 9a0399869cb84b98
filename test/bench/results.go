// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/aclements/go-moremath/stats"
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
