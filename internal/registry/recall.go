// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// Recall has ports keep the ages that an earlier agent knew, if a source finds them by
// its first dump and an origin tells that they are the same. Of the publications the key,
// the times and the origins are used; they must not be changed afterwards. Call it before
// the first source runs.
func (r *Registry) Recall(earlier []port.Publication) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.earlier = make(map[port.Origin][]*port.Publication, len(earlier))
	for i := range earlier {
		p := &earlier[i]
		best := identityOf(p)
		for _, o := range p.Origins {
			if best > 0 && identity(o) == best {
				r.earlier[o.Origin] = append(r.earlier[o.Origin], p)
			}
		}
	}
}

// identity orders origins by how well they tell that a port was not closed and opened
// again while nobody looked: no two sockets have one cookie, and no two rules one handle while
// their table remains. It is 0 if they do not tell: a container keeps its id when it is started
// again, and a rule of iptables-legacy has no handle.
func identity(o port.OriginInfo) int {
	switch {
	case o.Source == port.SourceSocket:
		return 2
	case o.Source == port.SourceNAT && o.Handle != 0:
		return 1
	}
	return 0
}

// identityOf is that of the origins that tell whether a port is p, 0 if none does.
func identityOf(p *port.Publication) (best int) {
	for _, o := range p.Origins {
		best = max(best, identity(o))
	}
	return best
}

// recalled is what an earlier agent knew of a binding's port.
type recalled struct {
	since   time.Time // of the port
	atLeast bool
	origin  time.Time // when the origin was seen first
}

// recall returns what an earlier agent knew of the port of a binding, nil if nothing.
func (r *Registry) recall(b *kept) *recalled {
	for _, p := range r.earlier[b.Origin] {
		o := originOf(p, b.Origin)
		same := p.Address == b.Address || p.Address.IsUnspecified() && b.Address.IsUnspecified() // of a dual-stack port
		if p.Slot() == b.Slot() && same && o.Handle == b.Handle {
			return &recalled{p.Since, p.SinceAtLeast, o.Since}
		}
	}
	return nil
}

func originOf(p *port.Publication, o port.Origin) port.OriginInfo {
	i := slices.IndexFunc(p.Origins, func(q port.OriginInfo) bool { return q.Origin == o })
	return p.Origins[i]
}

// since is when the origin was first seen, by this agent or an earlier one.
func (m member) since() time.Time {
	if m.recalled != nil {
		return m.recalled.origin
	}
	return m.binding.Since
}

// setAge sets the age of a publication with these bindings.
func (p *merged) setAge(ms []member) {
	for i, m := range ms {
		since, atLeast, recalled := m.binding.Since, m.found, false
		if e := m.recalled; e != nil {
			since, atLeast, recalled = e.since, e.atLeast, true
		}
		if i == 0 {
			p.Since, p.SinceAtLeast, p.recalled = since, atLeast, recalled
		} else {
			p.addAge(since, atLeast, recalled)
		}
	}
}

// addAge adds the age of one more origin. What an earlier agent knew is the age of the
// whole port: what else was found is not older, because that agent would have seen it.
func (p *merged) addAge(since time.Time, atLeast, recalled bool) {
	switch {
	case recalled != p.recalled:
		if recalled {
			p.Since, p.SinceAtLeast, p.recalled = since, atLeast, true
		}
	case recalled:
		if since.Before(p.Since) {
			p.Since, p.SinceAtLeast = since, atLeast
		}
	default:
		if since.Before(p.Since) {
			p.Since = since
		}
		p.SinceAtLeast = p.SinceAtLeast || atLeast
	}
}
