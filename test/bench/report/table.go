// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// group gathers cells by measure, in the order in which the measures first come.
func group(cells []Cell) (groups [][]Cell) {
	index := map[string]int{}
	for _, c := range cells {
		i, ok := index[c.Measure]
		if !ok {
			i = len(groups)
			index[c.Measure] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], c)
	}
	return groups
}

func uniq[T comparable](cells []Cell, of func(Cell) T) (out []T) {
	for _, c := range cells {
		if v := of(c); !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out
}

// baseOf returns the cell that others of its size are compared with.
func baseOf(cells []Cell, base string, size float64) (Cell, bool) {
	for _, c := range cells {
		if c.Size == size && (base == "" || c.Mode == base) {
			return c, c.OK()
		}
	}
	return Cell{}, false
}

// times is how many times the base a cell is: empty for the base itself, and
// where either failed.
func times(c Cell, base Cell, ok bool) string {
	if !ok || !c.OK() || c.Mode == base.Mode {
		return ""
	}
	return Ratio(c.Value, base.Value)
}

// table writes the cells of one measure as a table: one row a cell where there
// are samples, else one row a size and one column a mode.
func table(w io.Writer, cells []Cell, base string) {
	sized := slices.ContainsFunc(cells, func(c Cell) bool { return c.SizeUnit != "" })
	if slices.ContainsFunc(cells, func(c Cell) bool { return c.Dist != nil }) {
		distributions(w, cells, base, sized)
		return
	}
	if !sized {
		single(w, cells, base)
		return
	}
	modes := uniq(cells, func(c Cell) string { return c.Mode })
	head := append([]string{cells[0].SizeUnit}, modes...)
	compared := base
	if compared == "" {
		compared = modes[0]
	}
	for _, m := range modes {
		if m != compared {
			head = append(head, m+" : "+compared)
		}
	}
	row(w, head)
	rule(w, len(head))
	for _, size := range uniq(cells, func(c Cell) float64 { return c.Size }) {
		r := []string{Number(size)}
		b, ok := baseOf(cells, compared, size)
		var ratios []string
		for _, m := range modes {
			text, ratio := "", ""
			for _, c := range cells {
				if c.Mode == m && c.Size == size {
					text, ratio = figure(c), times(c, b, ok)
				}
			}
			r = append(r, text)
			if m != compared {
				ratios = append(ratios, ratio)
			}
		}
		row(w, append(r, ratios...))
	}
}

func single(w io.Writer, cells []Cell, base string) {
	extras := extraNames(cells)
	row(w, append([]string{"mode", "value", "ratio"}, extras...))
	rule(w, 3+len(extras))
	b, ok := baseOf(cells, base, 0)
	for _, c := range cells {
		row(w, append([]string{c.Mode, figure(c), times(c, b, ok)}, extraValues(c, extras)...))
	}
}

func distributions(w io.Writer, cells []Cell, base string, sized bool) {
	head := []string{"mode", "n", "p50", "p90", "p99", "max", "p50 : " + cmpBase(cells, base)}
	if sized {
		head = append([]string{cells[0].SizeUnit}, head...)
	}
	extras := extraNames(cells)
	head = append(head, extras...)
	row(w, head)
	rule(w, len(head))
	for _, c := range cells {
		b, ok := baseOf(cells, base, c.Size)
		var r []string
		if sized {
			r = append(r, Number(c.Size))
		}
		if d := c.Dist; c.OK() && d != nil {
			r = append(r, c.Mode, Number(float64(d.N)), Value(d.P50, c.Unit), enough(d.N, 10, d.P90, c.Unit), enough(d.N, forP99, d.P99, c.Unit),
				Value(d.Max, c.Unit), times(c, b, ok))
		} else {
			r = append(r, c.Mode, "", figure(c), "", "", "", "")
		}
		row(w, append(r, extraValues(c, extras)...))
	}
}

// forP99 is how many samples a p99 needs: with fewer it would be the greatest.
const forP99 = 100

func enough(n, need int, v float64, unit string) string {
	if n < need {
		return "–"
	}
	return Value(v, unit)
}

func cmpBase(cells []Cell, base string) string {
	if base == "" {
		return cells[0].Mode
	}
	return base
}

// figure is the cell's value, or that it failed.
func figure(c Cell) string {
	if !c.OK() {
		return "failed: " + c.Failed
	}
	return Value(c.Value, c.Unit)
}

func extraNames(cells []Cell) (names []string) {
	for _, c := range cells {
		for n := range c.Extra {
			if !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
	}
	slices.Sort(names)
	return names
}

func extraValues(c Cell, names []string) (out []string) {
	for _, n := range names {
		text := ""
		if v, ok := c.Extra[n]; ok {
			text = Number(short(v))
		}
		out = append(out, text)
	}
	return out
}

func row(w io.Writer, cells []string) {
	for i, c := range cells {
		cells[i] = strings.ReplaceAll(c, "|", `\|`)
	}
	_, _ = fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | "))
}

func rule(w io.Writer, n int) {
	_, _ = fmt.Fprintf(w, "|---%s|\n", strings.Repeat("|--:", n-1))
}
