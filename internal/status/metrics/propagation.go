// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Propagation measures how long ports take from the kernel's event to a sink's
// acknowledgement. Create it with NewPropagation; a struct of counters exports it.
type Propagation struct {
	times  *prometheus.HistogramVec
	recent recent
}

const (
	propagationName = "propagation_seconds"
	propagationHelp = "Time from the kernel event to the sink's acknowledgement that the port is active."

	// NativeFactor is how much wider each native bucket is than the one before.
	NativeFactor     = 1.1
	nativeMaxBuckets = 160
	nativeMinReset   = time.Hour
)

// Buckets returns the upper limits of the classic buckets, in seconds and dense where
// most values fall. A Prometheus that supports native buckets gets these as well.
func Buckets() []float64 {
	return []float64{50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 2e-3, 5e-3, 10e-3, 50e-3, 200e-3, 1, 5}
}

// NewPropagation returns an empty histogram.
func NewPropagation() *Propagation {
	return &Propagation{times: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: namespace, Name: propagationName, Help: propagationHelp, Buckets: Buckets(),
		NativeHistogramBucketFactor:     NativeFactor,
		NativeHistogramMaxBucketNumber:  nativeMaxBuckets,
		NativeHistogramMinResetDuration: nativeMinReset,
	}, []string{"sink"})}
}

// Add records that sink acknowledged a publication took after the kernel's event.
func (p *Propagation) Add(sink string, took time.Duration) {
	p.times.WithLabelValues(sink).Observe(took.Seconds())
	p.recent.add(took)
}

// Recent returns the propagation times since the given count of them, oldest
// first, and the count to ask with the next time. The latest 256 are kept.
func (p *Propagation) Recent(since uint64) ([]time.Duration, uint64) { return p.recent.since(since) }

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
