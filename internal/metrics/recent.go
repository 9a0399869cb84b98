// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"sync"
	"time"
)

// recent keeps the latest propagation times for the page's chart.
type recent struct {
	mu    sync.Mutex
	times [256]time.Duration
	count uint64 // ever added
}

func (r *recent) add(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.times[r.count%uint64(len(r.times))] = d
	r.count++
}

// since returns the times added after the first n, as far as they are still kept,
// and how many were ever added.
func (r *recent) since(n uint64) ([]time.Duration, uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kept := uint64(len(r.times))
	first := n
	if n > r.count { // n is from an earlier process
		first = 0
	}
	if r.count > kept {
		first = max(first, r.count-kept)
	}
	var out []time.Duration
	for i := first; i < r.count; i++ {
		out = append(out, r.times[i%kept])
	}
	return out, r.count
}
