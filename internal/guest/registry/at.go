// SPDX-License-Identifier: Apache-2.0

package registry

import "github.com/fairlead/fairlead/internal/port"

// At returns the publications at one protocol and port, the denied ones included.
func (r *Registry) At(s port.Slot) []port.Publication {
	first, last := s.Bounds()
	var out []port.Publication
	for _, p := range r.publications.View().Range(first, last) {
		out = append(out, p)
	}
	return out
}
