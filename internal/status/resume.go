// SPDX-License-Identifier: Apache-2.0

package status

import (
	"net/netip"
	"reflect"
	"slices"
)

// Resume joins several watches into one: at the start of a second watch only the
// differences to the end of the first one are reported.
type Resume struct {
	rows  map[rowKey]Publication
	seen  map[rowKey]bool // present in the watch that is beginning
	again bool            // a watch ended before
}

// Lost ends a watch.
func (r *Resume) Lost() { r.again, r.seen = r.rows != nil, nil }

// Events returns the events to report for one event of the watch.
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
	k := keyOf(*e.Publication)
	old, had := r.rows[k]
	if e.Type == Gone {
		delete(r.rows, k)
		return []Event{e}
	}
	r.rows[k] = *e.Publication
	if at, err := netip.ParseAddr(e.Replaces); err == nil {
		k.key.Address = at
		delete(r.rows, k)
	}
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
	case old.State == e.Publication.State && old.Lost == e.Publication.Lost && reflect.DeepEqual(old.HostAddresses, e.Publication.HostAddresses) &&
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

// synced ends the beginning of a watch: what is missing was removed meanwhile.
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
