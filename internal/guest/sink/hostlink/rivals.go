// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"time"

	"github.com/fairlead/fairlead/internal/link"
)

// rivalsFor is how long hosts are reported as rivals: longer than the longest
// pause after which one of them comes back.
const rivalsFor = 15 * time.Minute

// rivals finds two hosts that take the agent from each other.
type rivals struct {
	replaced link.Peer // the last host that another one replaced
	names    []string  // of the two
	until    time.Time // they are reported
}

// takeover records that next replaced old, and reports whether old had replaced
// next before.
func (r *rivals) takeover(old, next link.Peer, now time.Time) bool {
	if old.Identity == next.Identity { // a connection of its own that was lost
		return false
	}
	again := r.replaced.Identity == next.Identity
	r.replaced = old
	if again {
		r.names, r.until = []string{old.Name, next.Name}, now.Add(rivalsFor)
	}
	return again
}

// current returns the names of the two hosts, nil if there are none lately.
func (r *rivals) current(now time.Time) []string {
	if now.After(r.until) {
		return nil
	}
	return r.names
}
