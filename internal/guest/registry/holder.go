// SPDX-License-Identifier: Apache-2.0

package registry

import "github.com/fairlead/fairlead/internal/port"

// Holders names the containers of users' own engines. What such an engine says is its user's
// word: it names nothing but ports whose sockets belong to that user, as the kernel says,
// and an owner that any other engine names comes first.
type Holders interface {
	// Holder returns the container that a user's engine publishes a port for, with
	// [port.Owner.Held] but for its process. It does not wait for an engine.
	Holder(user uint32, k port.Key) (port.Owner, bool)
	// Notify has f called after each change, with the ports whose answer may differ now. It
	// is called once, before the source runs. f may ask for answers.
	Notify(f func([]port.Slot))
}

// SetHolders sets who names what users hold. Call it before the first source runs.
func (r *Registry) SetHolders(h Holders) {
	r.mu.Lock()
	r.holders = h
	r.mu.Unlock()
	h.Notify(func(slots []port.Slot) {
		r.mu.Lock()
		defer r.mu.Unlock()
		dirty := new(touched)
		for _, s := range slots {
			if len(r.slots[s]) > 0 {
				dirty.mark(s, 0)
			}
		}
		r.merge(dirty)
	})
}

// holder returns the container of a user's own engine that serves a socket of that user.
func (m member) holder() (port.Owner, bool) {
	b, s := m.binding, m.source
	if s == nil || s.r.holders == nil || s.name != port.SourceSocket || b.Hints.User == 0 || b.Owner.Kind != port.OwnerProcess {
		return port.Owner{}, false
	}
	o, ok := s.r.holders.Holder(b.Hints.User, b.Key)
	if !ok || o.Held == nil {
		return port.Owner{}, false
	}
	held := *o.Held
	held.Process = b.Owner.Name
	o.Held = &held
	return o, true
}
