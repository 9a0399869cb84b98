// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"io"
	"strings"
)

// Glance is a line of the first table: one figure of each mode, side by side.
type Glance struct {
	What    string // "a port is told, median"
	Note    string // shown behind it in the table alone
	Part    string
	Measure string
	Size    float64
	Stat    Stat
	More    bool // more is better
	// Modes are other names of the document's modes, in the same order: what stands
	// for them in a part that has not those. Note should say so.
	Modes []string
}

// modes returns the names under which a part has the document's modes.
func (g Glance) modes(d Document) []string {
	if g.Modes != nil {
		return g.Modes
	}
	return d.Modes
}

// asGood is how near two figures are that count as the same: what differs by
// less than a quarter differs by chance.
const asGood = 1.25

// glance writes what the run comes to, the first table, and in words where events
// are better, where polling is as good, and where it is better.
func (d Document) glance(w io.Writer, res *Results) {
	if len(d.Modes) < 2 {
		return
	}
	if d.Words != nil {
		if s := strings.TrimSpace(d.Words(res)); s != "" {
			_, _ = fmt.Fprintf(w, "%s\n\n", s)
		}
	}
	head := append([]string{""}, d.Modes...)
	for _, m := range d.Modes[1:] {
		head = append(head, m+" : "+d.Modes[0])
	}
	row(w, head)
	rule(w, len(head))
	var better, same, worse []string
	for _, g := range d.Glances {
		r, ratios, some := []string{g.What}, []string{}, false
		if g.Note != "" {
			r[0] += " (" + g.Note + ")"
		}
		first, _, ok := Ref{g.Part, g.Measure, g.modes(d)[0], g.Size, g.Stat}.find(res)
		said := false
		for i, m := range g.modes(d) {
			v, c, found := Ref{g.Part, g.Measure, m, g.Size, g.Stat}.find(res)
			if !found {
				r = append(r, "–")
				if i > 0 {
					ratios = append(ratios, "")
				}
				continue
			}
			some = true
			r = append(r, Value(v, c.Unit))
			if i == 0 {
				continue
			}
			if !ok {
				ratios = append(ratios, "")
				continue
			}
			ratios = append(ratios, Ratio(v, first))
			if said {
				continue
			}
			said = true // the words are of the quicker poller, which is the first
			a, b := first, v
			if g.More {
				a, b = v, first
			}
			text := g.What
			switch {
			case a*asGood < b:
				better = append(better, text)
			case b*asGood < a:
				worse = append(worse, text)
			default:
				same = append(same, text)
			}
		}
		if some {
			row(w, append(r, ratios...))
		}
	}
	_, _ = fmt.Fprintf(w, "\n–: not measured, or by too few samples: what 99 of 100 do not exceed needs %d.\n", forP99)
	_, _ = fmt.Fprintf(w, "\nIn words, %s beside %s:\n\n", d.Modes[0], d.Modes[1])
	for _, l := range []struct {
		name  string
		items []string
	}{{"**Better by events**", better}, {"**As good by polling** (within a quarter)", same}, {"**Better by polling**", worse}} {
		if len(l.items) > 0 {
			_, _ = fmt.Fprintf(w, "* %s: %s.\n", l.name, strings.Join(l.items, "; "))
		}
	}
}
