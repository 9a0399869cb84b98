// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strings"
)

// Stat is which figure of a cell is meant.
type Stat int

// The figures of a cell.
const (
	Median Stat = iota // of the samples, or the only value
	P99
)

func (s Stat) of(c Cell) (float64, bool) {
	if s == Median {
		return c.Value, true
	}
	if c.Dist == nil || c.Dist.N < forP99 {
		return 0, false
	}
	return c.Dist.P99, true
}

// Ref names a figure of a run.
type Ref struct {
	Part, Measure, Mode string
	Size                float64
	Stat                Stat
}

// find returns the figure and its cell; not ok where it was not measured or failed.
func (r Ref) find(res *Results) (v float64, c Cell, ok bool) {
	if c, ok = res.Cell(r.Part, r.Measure, r.Mode, r.Size); !ok {
		return 0, c, false
	}
	v, ok = r.Stat.of(c)
	return v, c, ok
}

// Target is a number to reach.
type Target struct {
	Key   string // of its reason, where it is not reached
	What  string
	Ref   Ref
	Limit float64
	Unit  string // of the limit, and of what is measured
	// AtLeast: the figure must not be below the limit; else not above it.
	AtLeast bool
	// Over divides the figure by that of another, Minus takes another's from it.
	Over, Minus *Ref
}

// judge returns what was measured and whether it is the target.
func (t Target) judge(res *Results) (measured string, reached, ok bool) {
	v, _, ok := t.Ref.find(res)
	for _, other := range []*Ref{t.Over, t.Minus} {
		if other == nil || !ok {
			continue
		}
		w, _, found := other.find(res)
		switch {
		case !found || t.Over != nil && w == 0:
			ok = false
		case t.Over != nil:
			v /= w
		default:
			v -= w
		}
	}
	if !ok {
		return "", false, false
	}
	return Value(v, t.Unit), v <= t.Limit && !t.AtLeast || v >= t.Limit && t.AtLeast, true
}

func (t Target) limit() string {
	if t.AtLeast {
		return "≥ " + Value(t.Limit, t.Unit)
	}
	return "≤ " + Value(t.Limit, t.Unit)
}

// Reasons reads why targets are not reached: Markdown, in which a heading of the
// second level is a target's key and what follows is its reason.
func Reasons(markdown string) map[string]string {
	out := map[string]string{}
	for i, part := range strings.Split("\n"+markdown, "\n## ") {
		if key, text, ok := strings.Cut(part, "\n"); ok && i > 0 {
			out[strings.TrimSpace(key)] = strings.Join(strings.Fields(text), " ")
		}
	}
	return out
}

func (d Document) targets(w io.Writer, res *Results) {
	var reasons []string
	row(w, []string{"what", "target", "measured", "reached"})
	_, _ = fmt.Fprintln(w, "|---|--:|--:|---|")
	told := map[string]int{}
	for _, t := range d.Targets {
		measured, reached, ok := t.judge(res)
		said := "yes"
		switch {
		case !ok:
			measured, said = "–", "not measured in this run"
			if c, _ := res.Cell(t.Ref.Part, t.Ref.Measure, t.Ref.Mode, t.Ref.Size); c.Failed != "" {
				said = "failed"
			}
		case !reached:
			said = "**no**"
		}
		if why := d.Reasons[t.Key]; ok && !reached && why != "" {
			if told[t.Key] == 0 {
				reasons = append(reasons, why)
				told[t.Key] = len(reasons)
			}
			said += fmt.Sprintf(" (%d)", told[t.Key])
		}
		row(w, []string{t.What, t.limit(), measured, said})
	}
	if len(reasons) > 0 {
		_, _ = fmt.Fprint(w, "\nWhy not:\n\n")
	}
	for i, r := range reasons {
		_, _ = fmt.Fprintf(w, "%d. %s\n", i+1, r)
	}
}
