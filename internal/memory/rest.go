// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
)

const (
	// headroom is how many bytes the runtime keeps free below a limit (its
	// memoryLimitMinHeapHeadroom).
	headroom = 1 << 20
	// leastGrowth is how many bytes may be allocated at rest, however small the heap is.
	leastGrowth = 3 << 19
	// startSize is how many bytes the runtime may use at the start, until something is collected.
	startSize = 48 << 20
	// defaultPercent is the runtime's GOGC if nobody sets it.
	defaultPercent = 100
)

// collector decides when the Go runtime collects garbage.
//
// The runtime collects at least every two minutes, even if nothing was allocated, and looks
// at the whole heap each time. A process that rests has no use for that. So the collector
// switches the pacing by GOGC off then, and limits the runtime's memory to what the next
// collection would have waited for. The first collection ends the rest: the pacing is as
// before, without a limit. A process that grows is thus never slowed down by the limit.
type collector struct {
	mu      sync.Mutex
	percent int  // GOGC while the process works
	own     bool // false if the environment decides
	resting bool
	rests   uint64 // counts them, so that a collection ends only the rest it belongs to
	ended   func() // called after a collection has ended the rest
}

// newCollector returns a collector that uses GOGC percent while the process works, 0 for the
// runtime's default. It changes nothing if the environment has GOGC or GOMEMLIMIT.
func newCollector(percent int) *collector {
	if percent == 0 {
		percent = defaultPercent
	}
	return &collector{percent: percent, own: os.Getenv("GOGC") == "" && os.Getenv("GOMEMLIMIT") == ""}
}

// rest has no garbage collected before the process has allocated as much as its GOGC allows.
// ended is called when a collection has ended the rest; it must not call the collector.
func (c *collector) rest(ended func()) {
	used, live := readRuntime()
	c.restUntil(used+headroom+max(leastGrowth, live/100*uint64(c.percent)), ended)
}

// start has no garbage collected while the runtime uses less than startSize. As GOGC has it,
// a start would collect at 4, 6, 9 MB, and so on.
func (c *collector) start() { c.restUntil(startSize, func() {}) }

// restUntil has no garbage collected while the runtime uses less than limit bytes.
func (c *collector) restUntil(limit uint64, ended func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.own {
		return
	}
	if c.ended = ended; c.resting {
		return
	}
	c.resting = true
	c.rests++
	debug.SetMemoryLimit(int64(limit))
	debug.SetGCPercent(-1)
	// Nothing refers to this object, so the next collection calls the function.
	runtime.AddCleanup(new(*int), c.collected, c.rests)
}

// collected is called after a collection.
func (c *collector) collected(rest uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resting && c.rests == rest {
		c.paced()
		c.ended()
	}
}

// work collects as GOGC says.
func (c *collector) work() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.own {
		c.paced()
	}
}

// paced requires c.mu.
func (c *collector) paced() {
	c.resting = false
	debug.SetGCPercent(c.percent)
	debug.SetMemoryLimit(math.MaxInt64)
}

// readRuntime returns how many bytes the Go runtime uses of the system's memory, as its
// limit counts them, and how many were alive at the last collection.
func readRuntime() (used, live uint64) {
	s := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/gc/heap/live:bytes"},
	}
	metrics.Read(s)
	return s[0].Value.Uint64() - s[1].Value.Uint64(), s[2].Value.Uint64()
}
