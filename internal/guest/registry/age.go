// SPDX-License-Identifier: Apache-2.0

package registry

import "time"

// setAge sets the age of a publication with these bindings.
func (p *merged) setAge(ms []member) {
	p.Since, p.SinceAtLeast = ms[0].binding.Since, ms[0].found
	for _, m := range ms[1:] {
		p.addAge(m.binding.Since, m.found)
	}
}

// addAge adds the age of one more origin.
func (p *merged) addAge(since time.Time, atLeast bool) {
	if since.Before(p.Since) {
		p.Since = since
	}
	p.SinceAtLeast = p.SinceAtLeast || atLeast
}
