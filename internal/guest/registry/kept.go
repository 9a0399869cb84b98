// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"net/netip"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// kept is what the registry keeps of a binding, with the names that port.Binding has. There
// is one for each origin. What it refers to is immutable, and may be shared with others.
type kept struct {
	port.Key
	Mapped    bool
	Inner     bool
	Paused    bool
	Searching bool
	Maker     port.Maker
	Origin    port.Origin
	Withheld  port.Reason
	Target    uint64
	Dial      []netip.AddrPort
	Doubt     string
	Owner     *port.Owner
	Hints     *port.Hints
	Detail    port.Detail
	Since     time.Time
}

// keep returns what to keep of a binding. It shares what the one before it had as well:
// many sockets are of one process.
func (s *source) keep(b *port.Binding) *kept {
	s.last.owner = shared(s.last.owner, b.Owner, port.Owner.Equal)
	s.last.hints = shared(s.last.hints, b.Hints, port.Hints.Equal)
	return &kept{
		Key: b.Key, Mapped: b.Mapped, Inner: b.Inner, Paused: b.Paused, Searching: b.Searching, Maker: b.Maker,
		Origin: port.Origin{Source: s.name, ID: b.Origin.ID}, Withheld: b.Withheld, Target: b.Target,
		Dial: b.Dial, Doubt: b.Doubt, Owner: s.last.owner, Hints: s.last.hints, Detail: b.Detail, Since: b.Since,
	}
}

// shared returns last if it is equal to v, or else v.
func shared[T any](last *T, v T, equal func(a, b T) bool) *T {
	if last != nil && equal(*last, v) {
		return last
	}
	return new(v)
}

// same reports whether a source repeats a binding.
func (k *kept) same(b *port.Binding) bool {
	return k.Key == b.Key && k.Origin.ID == b.Origin.ID && k.Mapped == b.Mapped &&
		k.Withheld == b.Withheld && k.Inner == b.Inner && k.Paused == b.Paused && k.Maker == b.Maker && k.Doubt == b.Doubt && k.Target == b.Target &&
		k.Searching == b.Searching && slices.Equal(k.Dial, b.Dial) && k.Owner.Equal(b.Owner) &&
		k.Hints.Equal(b.Hints) && k.Detail.Equal(b.Detail)
}
