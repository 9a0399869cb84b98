// SPDX-License-Identifier: Apache-2.0

// Package peer is what sinks have in common that speak to a foreign peer: one
// that knows ports, but neither publications nor sessions.
package peer

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// Claim is one publication's wish for one host address.
type Claim struct {
	Key  port.Key
	Host netip.AddrPort
}

// Shares shares out host addresses among the publications that ask for them, so
// that an address is given up only when the last of them is gone. The zero value
// is not usable: see NewShares. It is not safe for concurrent use.
type Shares struct {
	asked map[port.Key][]netip.AddrPort
	slots map[port.Slot]map[Claim]struct{} // by protocol and host port
	dirty map[port.Slot]struct{}
}

// NewShares returns shares of nothing.
func NewShares() *Shares {
	return &Shares{
		asked: make(map[port.Key][]netip.AddrPort),
		slots: make(map[port.Slot]map[Claim]struct{}),
		dirty: make(map[port.Slot]struct{}),
	}
}

// Set notes what a publication asks for; nothing means that it is gone. The
// slots that it asked for and asks for are dirty then, even if nothing changed:
// the publication may be served differently.
func (s *Shares) Set(k port.Key, hosts []netip.AddrPort) {
	for _, h := range s.asked[k] {
		slot := port.Slot{Protocol: k.Protocol, Port: h.Port()}
		delete(s.slots[slot], Claim{k, h})
		if len(s.slots[slot]) == 0 {
			delete(s.slots, slot)
		}
		s.dirty[slot] = struct{}{}
	}
	if len(hosts) == 0 {
		delete(s.asked, k)
		return
	}
	s.asked[k] = slices.Clone(hosts)
	for _, h := range hosts {
		slot := port.Slot{Protocol: k.Protocol, Port: h.Port()}
		if s.slots[slot] == nil {
			s.slots[slot] = make(map[Claim]struct{})
		}
		s.slots[slot][Claim{k, h}] = struct{}{}
		s.dirty[slot] = struct{}{}
	}
}

// Keys returns the publications that ask for anything, in no order.
func (s *Shares) Keys() []port.Key { return slices.Collect(maps.Keys(s.asked)) }

// Asked returns what a publication asks for. The caller must not change it.
func (s *Shares) Asked(k port.Key) []netip.AddrPort { return s.asked[k] }

// Dirty is the set of slots to look at. Who has looked at one deletes it.
func (s *Shares) Dirty() map[port.Slot]struct{} { return s.dirty }

// Touch makes every slot dirty that anything asks for.
func (s *Shares) Touch() {
	for slot := range s.slots {
		s.dirty[slot] = struct{}{}
	}
}

// Share says which claims of a slot get their host address, and to whom the
// others lose theirs. An exact loopback address of the guest goes before a
// wildcard, and that before other addresses; a wildcard of the host takes all
// addresses of its family, if none of them is given to somebody before it.
func (s *Shares) Share(slot port.Slot) (granted map[netip.Addr]port.Key, lost map[Claim]port.Key) {
	granted, lost = make(map[netip.Addr]port.Key), make(map[Claim]port.Key)
	claims := slices.SortedFunc(maps.Keys(s.slots[slot]), func(a, b Claim) int {
		return cmp.Or(cmp.Compare(rank(a.Key.Address), rank(b.Key.Address)), a.Key.Compare(b.Key), a.Host.Compare(b.Host))
	})
	var first, all [2]*Claim // by family
	for _, c := range claims {
		ip := c.Host.Addr()
		f := 0
		if ip.Is4() {
			f = 1
		}
		by, taken := granted[ip]
		switch {
		case taken:
		case all[f] != nil:
			by, taken = all[f].Key, true
		case port.IsWildcard(ip) && first[f] != nil:
			by, taken = first[f].Key, true
		}
		if taken {
			lost[c] = by
			continue
		}
		granted[ip] = c.Key
		if first[f] == nil {
			first[f] = &c
		}
		if port.IsWildcard(ip) {
			all[f] = &c
		}
	}
	return granted, lost
}

// rank orders the guest addresses that share one host address.
func rank(guest netip.Addr) int {
	switch {
	case guest.IsLoopback():
		return 0
	case port.IsWildcard(guest):
		return 1
	}
	return 2
}
