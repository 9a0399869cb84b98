// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

// TestAgeOfFoundPort: what the first dump finds was open before, for an unknown time; what
// opens later has an age.
func TestAgeOfFoundPort(t *testing.T) {
	r := newRegistry()
	f := r.Feed("socket")
	event := binding("2", "0.0.0.0:81", 7)
	event.Observed = 1 // while the dump was made
	f.Replace([]port.Binding{binding("1", "0.0.0.0:80", 7), event})
	f.Apply(port.Change{Put: []port.Binding{binding("3", "0.0.0.0:82", 7), binding("4", "0.0.0.0:80", 7)}})
	f.Replace([]port.Binding{binding("1", "0.0.0.0:80", 8), binding("5", "0.0.0.0:83", 7)})
	for number, atLeast := range map[string]bool{"80": true, "83": false} {
		p, _ := r.Publications().View().Get(binding("", "0.0.0.0:"+number, 1).Key)
		if p.Since.IsZero() || p.SinceAtLeast != atLeast {
			t.Errorf("port %s: since %v, at least: %v", number, p.Since, p.SinceAtLeast)
		}
	}
	r = newRegistry()
	f = r.Feed("socket")
	f.Replace([]port.Binding{event})
	f.Apply(port.Change{Put: []port.Binding{binding("3", "0.0.0.0:82", 7)}})
	for _, p := range r.Publications().View().All() {
		if p.SinceAtLeast {
			t.Errorf("%v opened while the agent looked, and its age is not known", p.Key)
		}
	}
}
