// SPDX-License-Identifier: Apache-2.0

package status

import (
	"net/netip"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// A watch with a filter has the event with which a row leaves the filter, and no other of what
// the filter does not select.
func TestSelectionHasWhatLeavesTheFilter(t *testing.T) {
	row := func(address string, n uint16, s port.State) *Publication {
		return &Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.MustParseAddr(address), Port: n}}, State: s}
	}
	node := func(name string, p *Publication) *Publication { p.Node = name; return p }
	f, err := ParseFilter([]string{"state=active"})
	if err != nil {
		t.Fatal(err)
	}
	s := NewSelection(f)
	for i, c := range []struct {
		e    Event
		want bool
	}{
		{Event{Type: Present, Publication: row("127.0.0.1", 80, port.Active)}, true},
		{Event{Type: Present, Publication: row("127.0.0.1", 81, port.Denied)}, false},
		{Event{Type: Synced}, true},
		{Event{Type: Changed, Publication: row("127.0.0.1", 80, port.Conflict)}, true}, // it leaves
		{Event{Type: Changed, Publication: row("127.0.0.1", 80, port.Failed)}, false},
		{Event{Type: Changed, Publication: row("127.0.0.1", 80, port.Active)}, true},
		{Event{Type: Gone, Publication: row("127.0.0.1", 80, port.Active)}, true},
		{Event{Type: Added, Publication: row("127.0.0.1", 80, port.Pending)}, false}, // a row anew
		{Event{Type: Gone, Publication: row("127.0.0.1", 80, port.Pending)}, false},
		{Event{Type: Added, Publication: row("0.0.0.0", 82, port.Active)}, true},
		{Event{Type: Added, Publication: row("::", 82, port.Failed)}, false}, // each family by itself
		{Event{Type: Gone, Publication: row("0.0.0.0", 82, port.Active)}, true},
		{Event{Type: Added, Publication: node("a", row("0.0.0.0", 83, port.Active))}, true},
		{Event{Type: Changed, Publication: node("b", row("0.0.0.0", 83, port.Denied))}, false},
		{Event{Type: Changed, Publication: node("a", row("0.0.0.0", 83, port.Denied))}, true},
	} {
		if got := s.Selects(c.e); got != c.want {
			t.Errorf("event %d, %s %+v: selected %v, want %v", i, c.e.Type, c.e.Publication, got, c.want)
		}
	}
	if len(s.selected) != 0 {
		t.Errorf("%d rows are remembered after they left", len(s.selected))
	}
	all := NewSelection(Filter{})
	if !all.Selects(Event{Type: Changed, Publication: row("::", 1, port.Denied)}) {
		t.Error("without a filter an event is missing")
	}
}
