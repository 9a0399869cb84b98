// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// hide removes where another binding of the slot serves from the addresses that are
// dialled: the kernel prefers the socket of one address to that of all of them, to
// whatever interface these are bound. If that leaves none, all origins are withheld.
func (p *merged) hide(slot []member) {
	if len(slot) < 2 {
		return
	}
	var by *kept
	free := make([]netip.AddrPort, 0, len(p.Dial))
	for _, d := range p.Dial {
		if b := serverAt(slot, d); b == nil || b.Address == p.Address {
			free = append(free, d)
		} else if by = b; d.Addr() == port.Loopback(netip.IPv4Unspecified()) && p.Protocol == port.TCP {
			free = append(free, otherLoopback(slot, d)...)
		}
	}
	if by == nil {
		return
	}
	if p.Dial = slices.Clip(free); len(free) > 0 {
		return
	}
	p.withholdFor(by.Key)
}

// withholdFor withholds all origins, because the publication of key by serves wherever
// this one could be dialled.
func (p *merged) withholdFor(by port.Key) {
	for i := range p.Origins {
		if o := &p.Origins[i]; o.Withheld.IsZero() {
			o.Withheld = port.Because(port.Hidden, by.String())
		}
	}
}

// serverAt returns the binding of a slot that has the address alone and that the
// guest reaches there, nil if there is none. It is not a NAT rule: see diverts. The
// slot is sorted.
func serverAt(slot []member, at netip.AddrPort) *kept {
	i, found := slices.BinarySearchFunc(slot, at.Addr(), func(m member, a netip.Addr) int { return m.binding.Address.Compare(a) })
	if !found {
		return nil
	}
	for _, m := range slot[i:] {
		switch b := m.binding; {
		case b.Address != at.Addr():
			return nil
		case m.withheld().IsZero() && len(b.Hints.Targets) == 0 && slices.Contains(b.Dial, at):
			return b
		}
	}
	return nil
}

// otherLoopback returns an address of 127.0.0.0/8 where no binding of the slot serves,
// if one is near. A TCP server of all addresses is reached there as well; one of UDP
// would answer from 127.0.0.1.
func otherLoopback(slot []member, at netip.AddrPort) []netip.AddrPort {
	const tries = 16
	a := at.Addr()
	for range tries {
		a = a.Next()
		if d := netip.AddrPortFrom(a, at.Port()); serverAt(slot, d) == nil {
			return []netip.AddrPort{d}
		}
	}
	return nil
}
