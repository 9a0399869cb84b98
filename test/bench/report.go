// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	_ "embed"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	"golang.org/x/perf/benchfmt"
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
	Tables  []table
}

// writeReport writes README.md and its figures to dir: the medians of all runs, beside
// those of an earlier version, if there are any. Without a directory it writes the tables to w.
func writeReport(w io.Writer, dir string, all, before results) error {
	r := all.medians()
	goals, err := targets()
	if err != nil {
		return fmt.Errorf("targets.yaml: %w", err)
	}
	t, err := template.New("").Funcs(template.FuncMap{
		"join":    func(s []string) string { return strings.Join(s, " | ") },
		"rule":    func(head []string) string { return "---" + strings.Repeat("|--:", len(head)-1) },
		"part":    r.section,
		"figures": func() ([]string, error) { return r.figures(dir) },
		"glance":  r.glance,
		"across":  r.across,
		"targets": func() verdict { return all.verdict(goals, before) },
		"before":  func() results { return before },
		"failed":  all.failed,
		"runs":    func() int { return len(all.byRun()) },
		"took":    r.took,
	}).Parse(document)
	if err != nil {
		return err
	}
	if dir == "" {
		var sections []string
		for _, p := range parts() {
			sections = append(sections, p.section)
		}
		return t.ExecuteTemplate(w, "brief", slices.Compact(sections))
	}
	f, err := os.Create(filepath.Join(dir, "README.md"))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return t.Execute(f, all)
}

// took is how long a run took, if it was not interrupted.
func (r results) took() string {
	if end := r.find(runName); end != nil {
		return (time.Duration(end.Values[0].Value) * time.Second).String()
	}
	return "interrupted"
}

// glance writes a row of the first table, if it was measured: events beside two pollers.
func (r results) glance(what, name, unit string, size int) (string, error) {
	i := slices.IndexFunc(measures(), func(m measure) bool { return m.name == name })
	if i < 0 {
		return "", fmt.Errorf("nothing measures %q", name)
	}
	row, ratios := []string{what}, []string{}
	var events float64
	for n, mode := range append(measures()[i].modes, "", "")[:3] {
		v, ok := r.figure(nameOf(name, mode, size) + " " + unit)
		switch {
		case n == 0 && !ok:
			return "", nil
		case n == 0:
			events = v
		case ok:
			ratios = append(ratios, ratio(v, events))
		default:
			ratios = append(ratios, "")
		}
		row = append(row, valueOr(v, unit, ok))
	}
	return "\n| " + strings.Join(append(row, ratios...), " | ") + " |", nil
}

// across writes a row with what was measured in each of these modes, if anything was.
func (r results) across(modes, what, name, unit string) string {
	row, measured := what, false
	for _, mode := range strings.Fields(modes) {
		v, ok := r.figure(nameOf(name, mode, 0) + " " + unit)
		row += " | " + valueOr(v, unit, ok)
		measured = measured || ok
	}
	if !measured {
		return ""
	}
	return "\n| " + row + " |"
}

// figures draws each measure of several sizes into dir, and returns the lines that show them.
func (r results) figures(dir string) (lines []string, err error) {
	for _, p := range parts() {
		for _, m := range p.measures {
			if len(m.sizes) == 0 || len(r.of(m)) == 0 {
				continue
			}
			file := strings.ToLower(m.name) + ".svg"
			if err := r.draw(m, filepath.Join(dir, file)); err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			lines = append(lines, fmt.Sprintf("![%s](%s)", m.title, file))
		}
	}
	return lines, nil
}

// section returns nil if nothing of the section was measured.
func (r results) section(name string) *section {
	s := &section{}
	var methods []string
	for _, p := range parts() {
		for _, m := range p.measures {
			measured := r.of(m)
			if p.section != name || len(measured) == 0 {
				continue
			}
			s.Tables = append(s.Tables, r.table(m))
			if by := measured.Config("methods"); by != "" && !slices.Contains(methods, by) {
				methods = append(methods, by)
			}
		}
	}
	if len(s.Tables) == 0 {
		return nil
	}
	s.Methods = strings.Join(methods, "; ")
	return s
}

// table has a row for each result and a column for each unit. Ratios are those of the
// first one to the first mode at the same size.
func (r results) table(m measure) table {
	var units []string
	for _, res := range r.of(m) {
		for _, v := range res.Values {
			if !slices.Contains(units, v.Unit) {
				units = append(units, v.Unit)
			}
		}
	}
	t := table{Title: m.title, Head: []string{"mode", "n"}}
	for _, u := range units {
		t.Head = append(t.Head, heading(u, m.unit))
	}
	t.Head = append(t.Head, "ratio")
	var base float64
	for _, k := range m.keys() {
		res := r.find(k.name)
		if res == nil {
			continue
		}
		row := []string{k.mode, number(float64(res.Iters))}
		if len(m.sizes) > 0 {
			row[0] = number(float64(k.size)) + " " + m.sizeUnit + ", " + k.mode
		}
		for _, u := range units {
			v, ok := res.Value(u)
			row = append(row, valueOr(v, u, ok))
		}
		v, _ := res.Value(m.unit)
		if k.mode == m.modes[0] {
			base = v
			row = append(row, "")
		} else {
			row = append(row, ratio(v, base))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// heading names a column: by the prefix of its unit, where it has one.
func heading(unit, main string) string {
	if prefix, _ := cutUnit(unit); prefix != "" {
		return strings.TrimSuffix(prefix, "-")
	}
	if unit == main {
		return "median"
	}
	return unit
}

// line writes a result for the log.
func line(r *benchfmt.Result) string {
	s := string(r.Name)
	for _, v := range r.Values {
		prefix, _ := cutUnit(v.Unit)
		s += " " + prefix + value(v.Value, v.Unit)
	}
	return s
}

// draw writes a figure of a measure: the value against the size, one line per mode. The
// axis is logarithmic if values are far apart.
func (r results) draw(m measure, path string) error {
	p := plot.New()
	p.Title.Text = m.title
	p.Legend.Top = true
	p.Add(plotter.NewGrid())
	lines := map[string]plotter.XYs{}
	low, high := math.Inf(1), 0.0
	for _, k := range m.keys() {
		if v, ok := r.figure(k.name + " " + m.unit); ok {
			x := slices.Index(m.sizes, k.size)
			lines[k.mode] = append(lines[k.mode], plotter.XY{X: float64(x), Y: v})
			low, high = min(low, v), max(high, v)
		}
	}
	var sizes []string
	for _, size := range m.sizes {
		sizes = append(sizes, number(float64(size)))
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

// cutUnit splits p99-sec into p99- and sec.
func cutUnit(unit string) (prefix, base string) {
	i := strings.LastIndexByte(unit, '-') + 1
	return unit[:i], unit[i:]
}

// value writes a figure with its unit: 377 µs.
func value(v float64, unit string) string {
	_, unit = cutUnit(unit)
	counted, per, _ := strings.Cut(unit, "/")
	if counted != "sec" && counted != "B" {
		return number(v) + " " + unit
	}
	s := benchunit.CommonScale([]float64{v}, benchunit.Decimal)
	text := fmt.Sprintf("%.*f %s%s", max(s.Prec-1, 0), v/s.Factor, s.Prefix, strings.TrimSuffix(counted, "ec"))
	if per != "" {
		text += "/" + per
	}
	return text
}

func valueOr(v float64, unit string, ok bool) string {
	if !ok {
		return missing
	}
	return value(v, unit)
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
