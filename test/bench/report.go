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

	"golang.org/x/perf/benchunit"
	"golang.org/x/text/language"
	"golang.org/x/text/message"
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

// writeReport writes the report to w and its figures to dir; without a directory it
// writes the tables only.
func writeReport(w io.Writer, dir string, res *results) error {
	drawn, err := drawAll(dir, res)
	if err != nil {
		return err
	}
	t, err := template.New("").Funcs(template.FuncMap{
		"join":    func(s []string) string { return strings.ReplaceAll(strings.Join(s, " | "), "\n", " ") },
		"rule":    func(head []string) string { return "---" + strings.Repeat("|--:", len(head)-1) },
		"part":    func(name string) *section { return res.section(name, drawn) },
		"glance":  func() table { return res.glance(glances) },
		"targets": func() table { return res.targets(targets) },
		"reasons": func() []string { return res.reasons(targets, parseReasons(reasons)) },
		"absent":  func() string { return strings.Join(res.absent(), ", ") },
		"failed": func() []cell {
			return slices.DeleteFunc(slices.Clone(res.cells), func(c cell) bool { return c.Failed == "" })
		},
		"sections": func() (out []*section) {
			for _, p := range parts() {
				if s := res.section(p.section, nil); s != nil && p.section == p.name {
					out = append(out, s)
				}
			}
			return out
		},
		"seconds": func(s float64) time.Duration { return time.Duration(s) * time.Second },
	}).Parse(document)
	if err != nil {
		return err
	}
	if dir == "" {
		return t.ExecuteTemplate(w, "brief", nil)
	}
	return t.Execute(w, res.machine)
}

// writeReportDir writes README.md and its figures to dir, and removes other figures.
func writeReportDir(dir string, res *results) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(dir, "*.svg"))
	if err != nil {
		return err
	}
	for _, f := range old {
		if err := os.Remove(f); err != nil {
			return err
		}
	}
	f, err := os.Create(filepath.Join(dir, "README.md"))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return writeReport(f, dir, res)
}

// drawAll draws the figures of all measures that have results, and returns which.
func drawAll(dir string, res *results) (drawn map[string]bool, err error) {
	drawn = map[string]bool{}
	if dir == "" {
		return drawn, nil
	}
	for _, p := range parts() {
		for _, m := range p.measures {
			cells := res.measured(m)
			if m.figure.file == "" || len(cells) == 0 {
				continue
			}
			drawn[m.figure.file] = true
			if err := draw(filepath.Join(dir, m.figure.file+".svg"), m.figure.kind, cells); err != nil {
				return nil, fmt.Errorf("%s: %w", m.figure.file, err)
			}
		}
	}
	return drawn, nil
}

// measured returns the cells of a measure that did not fail, by size and mode.
func (r *results) measured(m measure) (cells []cell) {
	for _, size := range m.eachSize() {
		for _, mode := range m.modes {
			if c, ok := r.find(m.name, mode, size); ok {
				cells = append(cells, c)
			}
		}
	}
	return cells
}

// section returns nil if nothing of the part was measured.
func (r *results) section(name string, drawn map[string]bool) *section {
	s := &section{}
	var methods []string
	for _, p := range parts() {
		for _, m := range p.measures {
			cells := r.measured(m)
			if p.section != name || len(cells) == 0 {
				continue
			}
			if drawn[m.figure.file] {
				s.Figures = append(s.Figures, fmt.Sprintf("![%s](%s.svg)", m.name, m.figure.file))
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
		return nil
	}
	return s
}

// absent returns the sections of which nothing was measured.
func (r *results) absent() (names []string) {
	for _, p := range parts() {
		if r.section(p.section, nil) == nil && !slices.Contains(names, p.section) {
			names = append(names, p.section)
		}
	}
	return names
}

// table has a row for each cell. Ratios are to the first mode at the same size.
func (m measure) table(cells []cell) table {
	sampled := slices.ContainsFunc(cells, func(c cell) bool { return c.Dist != nil })
	var extras []string
	for _, c := range cells {
		for name := range c.Extra {
			if !slices.Contains(extras, name) {
				extras = append(extras, name)
			}
		}
	}
	slices.Sort(extras)
	head := []string{"mode", "value"}
	if sampled {
		head = []string{"mode", "n", "median", "±", "p99", "max"}
	}
	if len(m.sizes) > 0 {
		head = append([]string{m.sizeUnit}, head...)
	}
	t := table{Title: m.name, Head: slices.Concat(head, []string{"ratio"}, extras)}
	var base cell
	for _, c := range cells {
		if c.Mode == m.modes[0] {
			base = c
		}
		var row []string
		if len(m.sizes) > 0 {
			row = append(row, number(c.Size))
		}
		row = append(row, c.Mode)
		if sampled {
			row = append(row, c.samples()...)
		} else {
			row = append(row, value(c.Value, c.Unit))
		}
		if c.Mode != base.Mode && c.Size == base.Size {
			row = append(row, ratio(c.Value, base.Value))
		} else {
			row = append(row, "")
		}
		for _, name := range extras {
			text := ""
			if v, ok := c.Extra[name]; ok {
				text = number(v)
			}
			row = append(row, text)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// samples is n, median, confidence, p99 and max.
func (c cell) samples() []string {
	d := c.Dist
	if d == nil {
		return []string{"1", value(c.Value, c.Unit), missing, missing, value(c.Value, c.Unit)}
	}
	sure, p99 := missing, missing
	if d.Lo != 0 || d.Hi != 0 {
		sure = value(max(d.Hi-d.P50, d.P50-d.Lo), c.Unit)
	}
	if d.N >= enoughForP99 {
		p99 = value(d.P99, c.Unit)
	}
	return []string{number(float64(d.N)), value(d.P50, c.Unit), sure, p99, value(d.Max, c.Unit)}
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
	case "":
		return number(v)
	}
	return number(v) + " " + unit
}

// ratio writes how many times v is of base.
func ratio(v, base float64) string {
	switch r := v / base; {
	case base == 0:
		return missing
	case math.Abs(r) >= 10:
		return printer.Sprintf("%.0f×", r)
	default:
		return fmt.Sprintf("%.2f×", r)
	}
}
