// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// WriteCluster writes a list of a cluster as a human-readable table, and how far the list
// of each node can be relied on.
func WriteCluster(w io.Writer, l List, style Style) error {
	t := table{style: style, columns: []column{
		{head: "PORT"}, {head: "ADDRESS", least: 13}, {head: "STATE"}, {head: "NODE", least: 12}, {head: "OWNER", least: 8}, {head: "AGE"},
	}}
	reasons := slices.ContainsFunc(l.Publications, func(p Publication) bool { return p.Reason != "" })
	if reasons {
		t.columns = append(t.columns, column{head: "REASON", least: 16})
	}
	if style.Wide {
		t.columns = append(t.columns, column{head: "NAMESPACE"}, column{head: "SOURCES"})
	}
	for _, p := range l.Publications {
		row := []string{
			p.Key.Slot().String(), Quote(p.Address.String()), p.State.String(), Quote(p.Node), ownerColumn(p.Owner, style.Wide), Age(style.Now.Sub(p.Since)),
		}
		if reasons {
			row = append(row, orDash(Quote(p.Reason)))
		}
		if style.Wide {
			var sources []string
			for _, o := range p.Origins {
				sources = append(sources, o.Source)
			}
			row = append(row, orDash(Quote(p.Owner.Namespace)), orDash(Quote(strings.Join(sources, ","))))
		}
		t.add(row, p.State, false)
	}
	if len(t.rows) > 0 || style.Empty == "" {
		if err := t.write(w); err != nil {
			return err
		}
	} else if _, err := fmt.Fprintln(w, style.Empty); err != nil {
		return err
	}
	return WriteNodes(w, l, style)
}

// WriteNodes writes which nodes' lists are out of date or not complete. It writes nothing
// if all are.
func WriteNodes(w io.Writer, l List, style Style) error {
	for _, s := range l.Sources {
		lines := s.Warnings
		if s.Error != "" {
			lines = append([]string{"is " + s.State + ": " + s.Error}, lines...)
		}
		for _, line := range lines {
			if _, err := fmt.Fprintln(w, style.Paint.Paint(Yellow, "node "+Quote(s.Name)+" "+Quote(line))); err != nil {
				return err
			}
		}
	}
	return nil
}
