// SPDX-License-Identifier: Apache-2.0

package status

import (
	"reflect"
	"slices"
)

// Resume makes one story of several watches: what stands at the start of a
// second one is told only as far as it differs from what was last said.
type Resume struct {
	rows  map[rowKey]Publication
	seen  map[rowKey]bool // present in the watch that begins
	again bool            // a watch ended before
}

// Lost says that the watch ended.
func (r *Resume) Lost() { r.again, r.seen = r.rows != nil, nil }

// Events returns what is to be told for one event of the watch.
func (r *Resume) Events(e Event) []Event {
	if r.rows == nil {
		r.rows = make(map[rowKey]Publication)
	}
	if e.Type == Synced {
		return r.synced(e)
	}
	if e.Publication == nil {
		return []Event{e}
	}
	k := rowKey{e.Publication.Key(), e.Publication.Guest}
	old, had := r.rows[k]
	if e.Type == Gone {
		delete(r.rows, k)
		return []Event{e}
	}
	r.rows[k] = *e.Publication
	if e.Type != Present || !r.again {
		return []Event{e}
	}
	if r.seen == nil {
		r.seen = make(map[rowKey]bool)
	}
	r.seen[k] = true
	switch {
	case !had:
		e.Type = Added
	case old.State == e.Publication.State && reflect.DeepEqual(old.HostAddresses, e.Publication.HostAddresses) &&
		reflect.DeepEqual(old.Owner, e.Publication.Owner):
		return nil
	default:
		e.Type = Changed
		if old.State != e.Publication.State {
			e.Previous = &old.State
		}
	}
	return []Event{e}
}

// synced ends the beginning of a watch: what was there before and is not now is gone.
func (r *Resume) synced(e Event) (list []Event) {
	if r.again {
		for k, p := range r.rows {
			if !r.seen[k] {
				delete(r.rows, k)
				list = append(list, Event{Time: e.Time, Type: Gone, Publication: &p})
			}
		}
		slices.SortFunc(list, func(a, b Event) int { return a.Publication.Key().Compare(b.Publication.Key()) })
	}
	r.again, r.seen = false, nil
	return append(list, e)
}
