// SPDX-License-Identifier: Apache-2.0

package status

import (
	"io"
	"strings"
	"unicode/utf8"

	"github.com/fairlead/fairlead/internal/port"
)

// table aligns columns of text, with the state in colour, and truncates cells until
// a row fits the width. text/tabwriter would count the colours as text.
type table struct {
	style   Style
	columns []column
	rows    [][]string
	states  []port.State
	alerts  []bool // rows that other machines can reach for a time
}

type column struct {
	head  string
	least int // the width that it may be truncated to; 0 for never
}

// The columns in colour: the state, and where a port is reachable if that is an alert.
const stateColumn, hostAddressColumn = 2, 3

var stateColors = map[port.State]Color{
	port.Active: Green, port.Pending: Yellow, port.Conflict: Red, port.Failed: Red,
}

func (t *table) add(row []string, s port.State, alert bool) {
	t.rows = append(t.rows, row)
	t.states = append(t.states, s)
	t.alerts = append(t.alerts, alert)
}

// truncateOrder lists the columns to truncate, first to last: the host address or
// reason, which explain prints in full; the guest; the address; the owner.
var truncateOrder = []int{3, 6, 1, 4}

// gap is the space between two columns.
const gap = 2

// widths returns the columns' widths, truncated until a row fits.
func (t *table) widths() []int {
	widths := make([]int, len(t.columns))
	total := -gap
	for i, c := range t.columns {
		if !t.style.Bare {
			widths[i] = utf8.RuneCountInString(c.head)
		}
		for _, row := range t.rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
		total += widths[i] + gap
	}
	if t.style.Width == 0 {
		return widths
	}
	for _, i := range truncateOrder {
		if total > t.style.Width && i < len(widths) {
			room := widths[i] - max(t.columns[i].least, utf8.RuneCountInString(t.columns[i].head))
			cut := max(0, min(room, total-t.style.Width))
			widths[i] -= cut
			total -= cut
		}
	}
	return widths
}

func (t *table) write(w io.Writer) error {
	widths := t.widths()
	var b strings.Builder
	line := func(cells []string, color func(i int, s string) string) {
		for i, s := range cells {
			s = Shorten(s, widths[i])
			b.WriteString(color(i, s))
			if i < len(cells)-1 {
				b.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(s)+gap))
			}
		}
		b.WriteByte('\n')
	}
	heads := make([]string, len(t.columns))
	for i, c := range t.columns {
		heads[i] = c.head
	}
	if !t.style.Bare {
		line(heads, func(_ int, s string) string { return t.style.Paint.Paint(Bold, s) })
	}
	for r, row := range t.rows {
		line(row, func(i int, s string) string {
			switch {
			case i == stateColumn:
				return t.style.Paint.Paint(stateColors[t.states[r]], s)
			case i == hostAddressColumn && t.alerts[r]:
				return t.style.Paint.Paint(Red, s)
			}
			return s
		})
	}
	_, err := io.WriteString(w, b.String())
	return err
}
