// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"runtime"
	"testing"
	"weak"

	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

// Messages of commits that were applied are freed, few or many, also those whose slice is
// kept for the next commit.
func TestAppliedMessagesAreFreed(t *testing.T) {
	for _, n := range []int{3, 1000, 20_000} {
		c := newCommits(nil)
		var known []weak.Pointer[ruleset.Message]
		for range 2 {
			msgs := make([]*ruleset.Message, n)
			for i := range msgs {
				msgs[i] = &ruleset.Message{Raw: make([]byte, 64)}
				known = append(known, weak.Make(msgs[i]))
			}
			msgs[n-1].Type = ruleset.MsgNewGen
			if err := c.add(msgs); err != nil || len(c.pending) != n || len(c.partial) != 0 {
				t.Fatalf("%v: %d complete messages of %d, and %d others", err, len(c.pending), n, len(c.partial))
			}
			c.applied()
		}
		runtime.GC()
		left := 0
		for _, m := range known {
			if m.Value() != nil {
				left++
			}
		}
		if left > 0 || cap(c.pending) > 4096 || cap(c.partial) > 4096 {
			t.Errorf("%d of %d messages are kept, and room for %d and %d", left, 2*n, cap(c.pending), cap(c.partial))
		}
		runtime.KeepAlive(c)
	}
}
