// SPDX-License-Identifier: Apache-2.0

package registry

import "github.com/fairlead/fairlead/internal/port/compact"

// shrink makes the maps anew if most of what they had is gone.
func (r *Registry) shrink() {
	if !r.peak.Passed(len(r.slots)) {
		return
	}
	r.slots, r.redirects = compact.Map(r.slots), compact.Map(r.redirects)
	r.owners.byHints, r.owners.byKey = compact.Map(r.owners.byHints), compact.Map(r.owners.byKey)
	r.waits.byKey = compact.Map(r.waits.byKey)
	for _, s := range r.sources {
		s.set = compact.Map(s.set)
	}
}
