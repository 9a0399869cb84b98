// SPDX-License-Identifier: Apache-2.0

package status

import (
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// tracker turns deltas into events. It remembers the rows that a client was sent, so
// that a removed row can be shown in its last state.
type tracker struct {
	rows   map[rowKey]Publication
	synced bool
}

type rowKey struct {
	key   port.Key
	guest string
	// A port that is denied while it is open has two rows for a moment.
	unpublished bool
}

func keyOf(p Publication) rowKey { return rowKey{p.Key(), p.Guest, p.Unpublished} }

// dualStack returns the row of put that has what the row of an IPv4 wildcard had.
func dualStack(k rowKey, put []Publication) (to rowKey, ok bool) {
	if k.key.Address != netip.IPv4Unspecified() {
		return to, false
	}
	to = k
	to.key.Address = netip.IPv6Unspecified()
	return to, slices.ContainsFunc(put, func(p Publication) bool { return p.DualStack && keyOf(p) == to })
}

func newTracker() *tracker { return &tracker{rows: make(map[rowKey]Publication)} }

func (t *tracker) events(d Delta, now time.Time) []Event {
	var es []Event
	now = now.UTC()
	merged := make(map[rowKey]Publication) // rows that became part of another one, by that
	for _, gone := range d.Removed {
		k := rowKey{gone.Key, gone.Guest, gone.Unpublished}
		if old, ok := t.rows[k]; ok {
			delete(t.rows, k)
			if to, ok := dualStack(k, d.Put); ok {
				merged[to] = old
				continue
			}
			es = append(es, Event{Time: now, Type: Gone, Publication: &old})
		}
	}
	slices.SortFunc(d.Put, func(a, b Publication) int { return a.Key().Compare(b.Key()) })
	for _, p := range d.Put {
		k := keyOf(p)
		old, had := t.rows[k]
		t.rows[k] = p
		part, hasPart := merged[k]
		if !had && hasPart {
			old, had = part, true
		}
		switch {
		case !t.synced:
			es = append(es, Event{Time: now, Type: Present, Publication: &p})
		case !had:
			es = append(es, Event{Time: now, Type: Added, Publication: &p})
		case !reflect.DeepEqual(old, p):
			e := Event{Time: now, Type: Changed, Publication: &p}
			if hasPart {
				e.Replaces = part.Address.String()
			}
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
