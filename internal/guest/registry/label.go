// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// maxComplaints is how many warnings about labels are remembered as logged.
const maxComplaints = 1024

// apply sets the decision of p, and logs labels of its owner without effect, once for each
// owner.
func (r *Registry) apply(p *port.Publication) {
	p.Apply(r.rules.Decide(*p))
	if slices.Equal(p.Decision.Host, p.Dial) {
		p.Decision.Host = p.Dial // most ports have one list, which takes memory once
	}
	for _, text := range p.Warnings() {
		k := p.Owner.ID + " " + text
		if _, said := r.complaints[k]; said {
			continue
		}
		if r.complaints == nil || len(r.complaints) == maxComplaints {
			r.complaints = make(map[string]struct{})
		}
		r.complaints[k] = struct{}{}
		r.log.Warn("a label has no effect", "warning", text)
	}
}
