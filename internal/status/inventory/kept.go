// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// kept is since when ports are open, as an earlier agent of the same boot reported it: a
// new agent sees all ports for the first time when it starts.
type kept struct {
	earlier []Port // until the first report
	since   map[port.Key]times
}

// times are since when this agent knows a port of an owner, and since when it is open.
type times struct {
	owner       Owner
	known, open time.Time
}

// apply corrects the times of ports that the same owner had before the agent started, and
// has had since then.
func (k *kept) apply(ports []Port) {
	if k == nil {
		return
	}
	if k.earlier != nil {
		k.learn(ports)
		k.earlier = nil
	}
	for i, p := range ports {
		if t, ok := k.since[p.Key]; ok && t.owner == p.Owner && t.known.Equal(p.Since) {
			ports[i].Since = t.open
		}
	}
}

func (k *kept) learn(ports []Port) {
	before := make(map[port.Key]Port, len(k.earlier))
	for _, p := range k.earlier {
		before[p.Key] = p
	}
	k.since = make(map[port.Key]times)
	for _, p := range ports {
		if b, ok := before[p.Key]; ok && b.Owner == p.Owner && b.Since.Before(p.Since) {
			k.since[p.Key] = times{p.Owner, p.Since, b.Since}
		}
	}
}
