// SPDX-License-Identifier: Apache-2.0

package model

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/port"
)

// wish is one publication's claim of one host address.
type wish struct {
	pub port.Publication
	at  netip.AddrPort
}

// server says who serves a wish: wishes of one server share an address.
func (w wish) server() string {
	o := w.pub.Owner
	switch {
	case o.Kind != port.OwnerUnknown && o.ID != "":
		return fmt.Sprint("owner ", w.pub.Port, o.Kind, o.ID, o.Namespace)
	case w.pub.Target != 0:
		return fmt.Sprint("rule ", w.pub.Port, w.pub.Target)
	}
	return fmt.Sprint("key ", w.pub.Key)
}

func precedence(a netip.Addr) int {
	switch {
	case a == port.Loopback(a):
		return 0
	case a.IsUnspecified():
		return 1
	}
	return 2
}

// award returns the addresses that a host opens for these wishes, and the state of each
// wish: the first in the order of precedence has an address, its server shares it, and the
// wildcard of a server serves its narrower addresses. Protocols have nothing in common.
func award(wishes []wish) (open map[address]bool, states map[port.Key][]port.State) {
	slices.SortFunc(wishes, func(a, b wish) int {
		return cmp.Or(precedence(a.pub.Address)-precedence(b.pub.Address), a.pub.Key.Compare(b.pub.Key), a.at.Compare(b.at))
	})
	open, states = map[address]bool{}, map[port.Key][]port.State{}
	var accepted []wish
	for _, w := range wishes {
		if slices.ContainsFunc(accepted, func(o wish) bool {
			return o.pub.Protocol == w.pub.Protocol && overlap(o.at, w.at) && o.server() != w.server()
		}) {
			states[w.pub.Key] = append(states[w.pub.Key], port.Conflict)
			continue
		}
		accepted = append(accepted, w)
		states[w.pub.Key] = append(states[w.pub.Key], port.Active)
	}
	for _, w := range accepted {
		any := netip.AddrPortFrom(everywhere(w.at.Addr()), w.at.Port())
		if !slices.ContainsFunc(accepted, func(o wish) bool {
			return o.pub.Protocol == w.pub.Protocol && o.at == any && o.server() == w.server()
		}) {
			any = w.at
		}
		open[address{w.pub.Protocol, any}] = true
	}
	return open, states
}
