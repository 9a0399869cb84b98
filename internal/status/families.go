// SPDX-License-Identifier: Apache-2.0

package status

import (
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// line is what a table shows of a port: one row, or those of both wildcards of one owner.
type line struct {
	Publication
	both bool
}

// address is where the port is in the guest.
func (l line) address() string {
	if l.both {
		return "*"
	}
	return l.guestAddress()
}

// linesOf joins the rows of both wildcards of one owner, for people. A row that is denied alone
// stays by itself.
func linesOf(rows []Publication) []line {
	lines := make([]line, 0, len(rows))
	at := make(map[nodeRow]int) // IPv4 wildcards in lines
	for _, p := range rows {
		k := nodeRow{p.Node, idOf(p)}
		if p.Address.IsValid() && p.Address.IsUnspecified() {
			other, _ := p.Key.OtherFamily()
			k.row.Key = other
			if i, ok := at[k]; ok && lines[i].joins(p) {
				lines[i].join(p)
				continue
			}
			k.row.Key = p.Key
			at[k] = len(lines)
		}
		lines = append(lines, line{p, false})
	}
	return lines
}

// Ports is how many ports rows show: both wildcards of one owner are one.
func Ports(rows []Publication) int { return len(linesOf(rows)) }

// joins reports whether a row of the other family belongs to the line.
func (l line) joins(p Publication) bool {
	a, b := l.Owner, p.Owner
	return a.Kind == b.Kind && a.ID == b.ID && a.Name == b.Name && a.Namespace == b.Namespace && a.Cluster == b.Cluster &&
		l.Lost == p.Lost && (l.State == port.Denied) == (p.State == port.Denied)
}

// join adds a row of the other family to the line, which has the better state of both.
func (l *line) join(p Publication) {
	l.both = true
	if p.State > l.State || p.State == l.State && l.Reason == "" {
		l.State, l.Reason, l.Code = p.State, p.Reason, p.Code
	}
	if p.Since.Before(l.Since) {
		l.Since = p.Since
	}
	l.SinceAtLeast = l.SinceAtLeast || p.SinceAtLeast
	l.HostAddresses = slices.Concat(l.HostAddresses, p.HostAddresses)
	l.Origins = slices.Concat(l.Origins, p.Origins)
	if len(p.Others) > len(l.Others) {
		l.Others = p.Others
	}
	if p.ExposedUntil.After(l.ExposedUntil) {
		l.ExposedUntil = p.ExposedUntil
	}
}
