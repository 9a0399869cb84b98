// SPDX-License-Identifier: Apache-2.0

package status

import (
	"reflect"
	"slices"
	"time"
)

// tracker turns deltas into events. It remembers the rows that a client was sent, so
// that a removed row can be shown in its last state.
type tracker struct {
	rows   map[RowID]Publication
	synced bool
	same   func(old, p Publication) bool
}

func newTracker() *tracker { return &tracker{rows: make(map[RowID]Publication), same: same} }

// same reports whether there is nothing to report of a row that was put again.
func same(old, p Publication) bool { return reflect.DeepEqual(old, p) }

func (t *tracker) events(d Delta, now time.Time) []Event {
	var es []Event
	now = now.UTC()
	for _, k := range d.Removed {
		old, ok := t.rows[k]
		if !ok {
			continue
		}
		delete(t.rows, k)
		es = append(es, Event{Time: now, Type: Gone, Publication: &old})
	}
	slices.SortFunc(es, func(a, b Event) int { return a.Publication.Key.Compare(b.Publication.Key) })
	slices.SortFunc(d.Put, func(a, b Publication) int { return a.Key.Compare(b.Key) })
	for _, p := range d.Put {
		k := idOf(p)
		old, had := t.rows[k]
		t.rows[k] = p
		switch {
		case !t.synced:
			es = append(es, Event{Time: now, Type: Present, Publication: &p})
		case !had:
			es = append(es, Event{Time: now, Type: Added, Publication: &p})
		case !t.same(old, p):
			e := Event{Time: now, Type: Changed, Publication: &p}
			if old.State != p.State {
				e.Previous = &old.State
			}
			es = append(es, e)
		}
	}
	if !t.synced {
		t.synced = true
		es = append(es, Event{Time: now, Type: Synced})
	}
	return es
}
