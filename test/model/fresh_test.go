// SPDX-License-Identifier: Apache-2.0

package model

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// checkFresh compares what is published at a time at which nothing changes with what a registry
// publishes that knows nothing of what was before. It is told the same things in another order.
func (r *runner) checkFresh() error {
	fresh := newCore(r.ref.rules.compile(r.t), r.clock)
	ctx, cancel := context.WithCancel(r.t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = fresh.registry.Run(ctx) })
	for e, f := range fresh.facts {
		f.owners = maps.Clone(r.ref.facts[e])
		// A port that lost its owner waits, as long as engines know that they stopped it.
		f.stopped = maps.Clone(r.facts[e].stopped)
	}
	for _, source := range slices.Backward(sources) {
		var set []port.Binding
		for _, id := range slices.Backward(slices.Sorted(maps.Keys(r.ref.entries[source]))) {
			b := r.ref.entries[source][id].Binding
			if !slices.Contains(engines, source) { // these know since when
				b.Since = time.Time{}
			}
			set = append(set, b)
		}
		fresh.feeds[source].Replace(set)
	}
	r.rest()
	lines := slices.DeleteFunc(status.Differences(r.list(), fresh.list()), r.orphaned)
	if len(lines) > 0 {
		return fmt.Errorf("not as a registry that starts now has it:\n%s", strings.Join(lines, "\n"))
	}
	return nil
}

// orphaned reports whether a difference is that a port waits that lost its owner: its Service was
// deleted, and the rules of the Service are still there.
func (r *runner) orphaned(line string) bool {
	for k := range r.ref.orphans {
		row := fmt.Sprintf("%s %s: ", k.Slot(), k.Address)
		if r.ref.orphans[k] && (strings.HasPrefix(line, row+"ownerPending true,") || strings.HasPrefix(line, row+"decision ")) {
			return true
		}
	}
	return false
}

// list is what an agent lists, with what is of a host's rules alone.
func (c *core) list() (l status.List) {
	for _, p := range c.registry.Publications().View().All() {
		row := status.Describe(p, nil)
		row.Fact = p.Fact
		l.Publications = append(l.Publications, row)
	}
	return l
}
