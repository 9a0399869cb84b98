// SPDX-License-Identifier: Apache-2.0

package registry

import "maps"

// A Go map keeps the memory of the most that it ever had. After most of many ports
// have gone the maps are made anew.
const (
	manySlots = 1024
	mostGone  = 8 // 7 of 8
)

// shrink makes the maps anew if most of what they had is gone.
func (r *Registry) shrink() {
	if r.most = max(r.most, len(r.slots)); r.most < manySlots || len(r.slots) > r.most/mostGone {
		return
	}
	r.most = len(r.slots)
	r.slots, r.redirects = compact(r.slots), compact(r.redirects)
	r.owners.byHints, r.owners.byKey = compact(r.owners.byHints), compact(r.owners.byKey)
	r.waits.byKey = compact(r.waits.byKey)
	for _, s := range r.sources {
		s.set = compact(s.set)
	}
	if r.shrunk != nil {
		r.shrunk.Notify()
	}
}

// compact returns a map of the size that m needs. maps.Clone would keep its capacity.
func compact[M ~map[K]V, K comparable, V any](m M) M {
	out := make(M, len(m))
	maps.Copy(out, m)
	return out
}
