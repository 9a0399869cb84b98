// SPDX-License-Identifier: Apache-2.0

package status

import "time"

// Resume joins several watches into one: at the start of a second watch only the
// differences to the end of the first one are reported, when all is present.
type Resume struct {
	rows    map[RowID]Publication
	present map[RowID]Publication // in the watch that is beginning
	again   bool                  // a watch ended before
}

// Lost ends a watch.
func (r *Resume) Lost() { r.again, r.present = r.rows != nil, nil }

// Events returns the events to report for one event of the watch.
func (r *Resume) Events(e Event) []Event {
	if r.rows == nil {
		r.rows = make(map[RowID]Publication)
	}
	if e.Type == Synced {
		return append(r.differences(e), e)
	}
	if e.Publication == nil {
		return []Event{e}
	}
	k := idOf(*e.Publication)
	if e.Type == Present && r.again {
		if r.present == nil {
			r.present = make(map[RowID]Publication)
		}
		r.present[k] = *e.Publication
		return nil
	}
	if e.Type == Gone {
		delete(r.rows, k)
		return []Event{e}
	}
	r.rows[k] = *e.Publication
	return []Event{e}
}

// differences ends the beginning of a watch.
func (r *Resume) differences(e Event) []Event {
	if !r.again {
		return nil
	}
	var d Delta
	for k, p := range r.rows {
		if _, ok := r.present[k]; !ok {
			d.Removed = append(d.Removed, RowID{Key: p.Key, Guest: p.Guest, Unpublished: p.Unpublished, Waits: p.Waits})
		}
	}
	for _, p := range r.present {
		d.Put = append(d.Put, p)
	}
	t := tracker{rows: r.rows, synced: true, same: alike}
	r.again, r.present = false, nil
	return t.events(d, e.Time)
}

// alike is same without what another process has anew: times, and how it saw the port.
func alike(old, p Publication) bool { return same(old.lasting(), p.lasting()) }

// lasting is the row without what only the process that reports it has.
func (p Publication) lasting() Publication {
	p.Since, p.SinceAtLeast, p.Origins, p.Outcomes = time.Time{}, false, nil, nil
	p.Source, p.Target = "", 0 // of Origins
	return p
}
