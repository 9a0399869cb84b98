// SPDX-License-Identifier: Apache-2.0

package status

// Selection chooses the events of a watch by a filter. It remembers which rows were
// selected, so that the event with which a row leaves the filter is chosen as well.
type Selection struct {
	filter   Filter
	selected map[nodeRow]struct{}
}

// nodeRow is a row of one node of a cluster.
type nodeRow struct {
	node string
	row  RowID
}

// NewSelection returns the selection of a watch that has not begun.
func NewSelection(f Filter) *Selection { return &Selection{f, make(map[nodeRow]struct{})} }

// Selects reports whether the filter selects the row of e, or did until e. Events without a
// row are always selected. To be called once for each event, in their order.
func (s *Selection) Selects(e Event) bool {
	if e.Publication == nil || len(s.filter.terms) == 0 {
		return true
	}
	k := nodeRow{e.Publication.Node, idOf(*e.Publication)}
	was := s.leave(k)
	is := s.filter.Match(*e.Publication)
	if is && e.Type != Gone {
		s.selected[k] = struct{}{}
	}
	return is || was
}

// leave forgets a row, and reports whether it was selected.
func (s *Selection) leave(k nodeRow) bool {
	_, was := s.selected[k]
	delete(s.selected, k)
	return was
}
