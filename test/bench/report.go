// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	_ "embed"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	"golang.org/x/perf/benchunit"
	"golang.org/x/text/language"
	"golang.org/x/text/message"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

// document is the report; its prose is in the template.
//
//go:embed report.md
var document string

// reasons says why targets are missed, by the key of the target. It is written by
// hand: causes, not figures of one run.
//
//go:embed reasons.md
var reasons string

// enoughForP99 is the number of samples below which the p99 would be the maximum.
const enoughForP99 = 100

// missing stands for a figure that was not measured, or from too few samples.
const missing = "–"

// table is a table of the report.
type table struct {
	Title string
	Head  []string
	Rows  [][]string
}

// section is a part of the report that was measured.
type section struct {
	Methods string // the method that each mode used
	Figures []string
	Tables  []table
}

// writeReport writes README.md and its figures to dir. Without one it writes the tables
// to w.
func writeReport(w io.Writer, dir string, res *results) error {
	t, err := template.New("").Funcs(template.FuncMap{
		"join":    func(s []string) string { return strings.ReplaceAll(strings.Join(s, " | "), "\n", " ") },
		"rule":    func(head []string) string { return "---" + strings.Repeat("|--:", len(head)-1) },
		"part":    func(name string) (*section, error) { return res.section(name, dir) },
		"glance":  res.glance,
		"targets": func() verdict { return res.verdict(targets, parseReasons(reasons)) },
		"failed":  res.failed,
		"seconds": func(s float64) time.Duration { return time.Duration(s) * time.Second },
	}).Parse(document)
	if err != nil {
		return err
	}
	if dir == "" {
		return t.ExecuteTemplate(w, "brief", sections())
	}
	f, err := os.Create(filepath.Join(dir, "README.md"))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return t.Execute(f, res.machine)
}

// sections returns the names of all sections, in order.
func sections() (names []string) {
	for _, p := range parts() {
		names = append(names, p.section)
	}
	return slices.Compact(names)
}

// glance writes a row of the first table, if it was measured: events beside two pollers.
func (r *results) glance(what, name string, size float64) (string, error) {
	if !slices.ContainsFunc(measures(), func(m measure) bool { return m.name == name }) {
		return "", fmt.Errorf("nothing measures %q", name)
	}
	figures, ratios := []string{missing, missing, missing}, []string{"", "", ""}
	var events float64
	n := 0
	for _, c := range r.cells {
		if c.Measure != name || c.Size != size {
			continue
		}
		if n == 0 {
			events = c.Value
		}
		figures[n], ratios[n] = value(c.Value, c.Unit), ratio(c.Value, events)
		n++
	}
	if n == 0 {
		return "", nil
	}
	return "\n| " + strings.Join(slices.Concat([]string{what}, figures, ratios[1:]), " | ") + " |", nil
}

// section returns nil if nothing of the section was measured. Its figures are written to
// dir, if there is one.
func (r *results) section(name, dir string) (*section, error) {
	s := &section{}
	var methods []string
	for _, p := range parts() {
		for _, m := range p.measures {
			cells := r.measured(m)
			if p.section != name || len(cells) == 0 {
				continue
			}
			if m.figure != "" && dir != "" {
				s.Figures = append(s.Figures, fmt.Sprintf("![%s](%s.svg)", m.name, m.figure))
				if err := r.draw(m, filepath.Join(dir, m.figure+".svg")); err != nil {
					return nil, fmt.Errorf("%s: %w", m.figure, err)
				}
			}
			s.Tables = append(s.Tables, m.table(cells))
			for _, c := range cells {
				if by := c.Mode + ": " + c.By; c.By != "" && !slices.Contains(methods, by) {
					methods = append(methods, by)
				}
			}
		}
	}
	if s.Methods = strings.Join(methods, "; "); len(s.Tables) == 0 {
		return nil, nil
	}
	return s, nil
}

// measured returns the cells of a measure that did not fail, by size and mode.
func (r *results) measured(m measure) (cells []cell) {
	for _, k := range m.keys() {
		if c, ok := r.find(k); ok {
			cells = append(cells, c)
		}
	}
	return cells
}

// table has a row for each cell. Ratios are to the first mode at the same size.
func (m measure) table(cells []cell) table {
	t := table{Title: m.name, Head: []string{"mode", "n", "median", "±", "p99", "max", "ratio"}}
	extras := slices.ContainsFunc(cells, func(c cell) bool { return len(c.Extra) > 0 })
	if extras {
		t.Head = append(t.Head, "also")
	}
	var base cell
	for _, c := range cells {
		label, margin, p99, times := c.Mode, missing, missing, ""
		if len(m.sizes) > 0 {
			label = number(c.Size) + " " + m.sizeUnit + ", " + label
		}
		if c.Mode == m.modes[0] {
			base = c
		} else if c.Size == base.Size {
			times = ratio(c.Value, base.Value)
		}
		if c.Margin != 0 {
			margin = value(c.Margin, c.Unit)
		}
		if c.N >= enoughForP99 {
			p99 = value(c.P99, c.Unit)
		}
		row := []string{label, number(float64(c.N)), value(c.Value, c.Unit), margin, p99, value(c.Max, c.Unit), times}
		if extras {
			row = append(row, c.also())
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// also writes the further figures.
func (c cell) also() string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(c.Extra)) {
		all = append(all, name+" "+number(c.Extra[name]))
	}
	return strings.Join(all, ", ")
}

// draw writes a figure of a measure: the value against the size, one line per mode. The
// axis is logarithmic if values are far apart.
func (r *results) draw(m measure, path string) error {
	p := plot.New()
	p.Title.Text = m.name
	p.Legend.Top = true
	p.Add(plotter.NewGrid())
	var sizes []string
	for _, size := range m.sizes {
		sizes = append(sizes, number(float64(size)))
	}
	lines := map[string]plotter.XYs{}
	low, high := math.Inf(1), 0.0
	for _, c := range r.measured(m) {
		x := slices.Index(m.sizes, int(c.Size))
		lines[c.Mode] = append(lines[c.Mode], plotter.XY{X: float64(x), Y: c.Value})
		low, high = min(low, c.Value), max(high, c.Value)
	}
	p.NominalX(sizes...)
	p.X.Label.Text = m.sizeUnit
	p.Y.Tick.Marker = unitTicks{plot.DefaultTicks{}, m.unit}
	if low > 0 && high > 20*low {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, unitTicks{plot.LogTicks{Prec: -1}, m.unit}
	}
	var named []any
	for _, mode := range m.modes {
		named = append(named, mode, lines[mode])
	}
	if err := plotutil.AddLinePoints(p, named...); err != nil {
		return err
	}
	return p.Save(18*vg.Centimeter, 9*vg.Centimeter, path)
}

// unitTicks labels ticks with a unit.
type unitTicks struct {
	plot.Ticker
	unit string
}

func (t unitTicks) Ticks(low, high float64) []plot.Tick {
	ticks := t.Ticker.Ticks(low, high)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = value(ticks[i].Value, t.unit)
		}
	}
	return ticks
}

var printer = message.NewPrinter(language.English)

// number writes at least three digits: 0.0124, 10,000.
func number(v float64) string {
	if math.Abs(v) >= 999.5 {
		return printer.Sprintf("%.0f", v)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// value writes a figure with its unit: 377.5 µs.
func value(v float64, unit string) string {
	switch unit {
	case "s", "B", "B/s":
		s := benchunit.CommonScale([]float64{v}, benchunit.Decimal)
		return fmt.Sprintf("%.*f %s%s", max(s.Prec-1, 0), v/s.Factor, s.Prefix, unit)
	}
	return number(v) + " " + unit
}

// ratio writes how many times v is of base.
func ratio(v, base float64) string {
	r := v / base
	switch {
	case base == 0:
		return missing
	case math.Abs(r) >= 10:
		return number(math.Round(r)) + "×"
	}
	return fmt.Sprintf("%.2f×", r)
}
