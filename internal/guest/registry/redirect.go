// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// redirects are the slots whose NAT rules send on to ports of this machine, by
// the slots of these: the owner is that of who listens there. The registry's lock
// guards it.
type redirects map[port.Slot]*bag[port.Slot]

func (rs redirects) add(b *kept) {
	for s := range redirected(b) {
		if rs[s] == nil {
			rs[s] = new(bag[port.Slot])
		}
		rs[s].add(b.Slot())
	}
}

func (rs redirects) drop(b *kept) {
	for s := range redirected(b) {
		if rs[s].drop(b.Slot()); rs[s].empty() {
			delete(rs, s)
		}
	}
}

// spread marks the slots that send on to one that is marked. It goes one step:
// what NAT has sent on meets no other rule.
func (rs redirects) spread(dirty *touched) {
	if len(rs) == 0 {
		return
	}
	for i := range len(dirty.slots) {
		if to := rs[dirty.slots[i].slot]; to != nil {
			to.each(func(s port.Slot) { dirty.mark(s, 0) })
		}
	}
}

// redirected yields where the NAT rule of b sends to on this machine, with the
// address there: nothing if b is no NAT rule.
func redirected(b *kept) iter.Seq2[port.Slot, netip.Addr] {
	return func(yield func(port.Slot, netip.Addr) bool) {
		for _, t := range b.Hints.Targets {
			if t.Addr().IsLoopback() && !yield(port.Slot{Protocol: b.Protocol, Port: t.Port()}, t.Addr()) {
				return
			}
		}
	}
}

// leaves reports whether the NAT rule of b sends to another machine or namespace.
func leaves(b *kept) bool {
	return slices.ContainsFunc(b.Hints.Targets, func(t netip.AddrPort) bool { return !t.Addr().IsLoopback() })
}

// listener returns who owns the ports of this machine that a NAT rule sends to;
// false if nobody listens on one, or they are not all of one known owner.
func (m member) listener(all slots) (owner port.Owner, ok bool) {
	if leaves(m.binding) {
		return port.Owner{}, false
	}
	for s, addr := range redirected(m.binding) {
		slot := all(s)
		ms := serving(slot, addr)
		if len(ms) == 0 {
			return port.Owner{}, false
		}
		o, known := ownerOf(ms, slot, all)
		if known == unknown || ok && !o.Same(owner) {
			return port.Owner{}, false
		}
		owner, ok = o, true
	}
	return owner, ok
}

// leadsTo calls f with the owners, as far as they are known, of everything that a
// NAT rule sends to.
func (m member) leadsTo(all slots, f func(port.Owner)) {
	if a := m.attribution; a != nil && len(m.binding.Hints.Targets) > 0 {
		if a.known {
			f(a.owner)
		}
		for _, o := range a.targets {
			f(o)
		}
		for _, o := range a.rivals {
			f(o)
		}
	}
	for s, addr := range redirected(m.binding) {
		slot := all(s)
		if ms := serving(slot, addr); len(ms) > 0 {
			o, known := ownerOf(ms, slot, all)
			f(o)
			servers(lenders(ms, slot), known, all, f)
		}
	}
}

// serving returns, of the bindings of a slot, those of the key whose socket gets
// what is sent to addr of this machine, as the kernel looks for it; NAT rules are
// not among them.
func serving(slot []member, addr netip.Addr) (ms []member) {
	wide := netip.IPv6Unspecified()
	if addr.Is4() {
		wide = netip.IPv4Unspecified()
	}
	for _, at := range []netip.Addr{addr, wide} {
		listens := false
		for _, m := range slot {
			if b := m.binding; b.Address == at && len(b.Hints.Targets) == 0 {
				ms = append(ms, m)
				listens = listens || b.Origin.Source == port.SourceSocket && b.Withheld.IsZero()
			}
		}
		if listens {
			slices.SortFunc(ms, member.compare)
			return ms
		}
		ms = ms[:0]
	}
	return nil
}
