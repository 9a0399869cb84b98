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
	t, err := template.New("").Funcs(template.FuncMap{
		"join":    func(s []string) string { return strings.ReplaceAll(strings.Join(s, " | "), "\n", " ") },
		"rule":    func(head []string) string { return "---" + strings.Repeat("|--:", len(head)-1) },
		"part":    func(name string) (*section, error) { return res.section(name, dir) },
		"glance":  func() table { return res.glance(glances) },
		"targets": func() table { return res.targets(targets) },
		"reasons": func() []string { return res.reasons(targets, parseReasons(reasons)) },
		"failed": func() []cell {
			return slices.DeleteFunc(slices.Clone(res.cells), func(c cell) bool { return c.Failed == "" })
		},
		"seconds": func(s float64) time.Duration { return time.Duration(s) * time.Second },
	}).Parse(document)
	if err != nil {
		return err
	}
	if dir == "" {
		return t.ExecuteTemplate(w, "brief", sections())
	}
	return t.Execute(w, res.machine)
}

// sections returns the names of all sections, in order.
func sections() (names []string) {
	for _, p := range parts() {
		if !slices.Contains(names, p.section) {
			names = append(names, p.section)
		}
	}
	return names
}

// writeReportDir writes README.md and its figures to dir, and removes other figures.
func writeReportDir(dir string, res *results) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	old, _ := filepath.Glob(filepath.Join(dir, "*.svg")) // the pattern is a good one
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
				if err := draw(filepath.Join(dir, m.figure+".svg"), cells); err != nil {
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
	for _, size := range m.eachSize() {
		for _, mode := range m.modes {
			if c, ok := r.find(m.name, mode, size); ok {
				cells = append(cells, c)
			}
		}
	}
	return cells
}

// table has a row for each cell. Ratios are to the first mode at the same size.
func (m measure) table(cells []cell) table {
	t := table{Title: m.name, Head: []string{"mode", "n", "median", "±", "p99", "max", "ratio", "also"}}
	var base cell
	for _, c := range cells {
		label, times, also := c.Mode, "", []string{}
		if len(m.sizes) > 0 {
			label = number(c.Size) + " " + m.sizeUnit + ", " + label
		}
		if c.Mode == m.modes[0] {
			base = c
		} else if c.Size == base.Size {
			times = ratio(c.Value, base.Value)
		}
		for _, name := range slices.Sorted(maps.Keys(c.Extra)) {
			also = append(also, name+" "+number(c.Extra[name]))
		}
		margin, p99 := missing, missing
		if c.Margin != 0 {
			margin = value(c.Margin, c.Unit)
		}
		if c.N >= enoughForP99 {
			p99 = value(c.P99, c.Unit)
		}
		t.Rows = append(t.Rows, []string{
			label, number(float64(c.N)), value(c.Value, c.Unit), margin, p99, value(c.Max, c.Unit), times, strings.Join(also, ", "),
		})
	}
	if !slices.ContainsFunc(cells, func(c cell) bool { return len(c.Extra) > 0 }) {
		t.Head = t.Head[:7]
		for i := range t.Rows {
			t.Rows[i] = t.Rows[i][:7]
		}
	}
	return t
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
