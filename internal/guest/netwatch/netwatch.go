// SPDX-License-Identifier: Apache-2.0

// Package netwatch watches the links, addresses and routes of a network
// namespace. A [Watcher] keeps a current [Snapshot] and notifies of its changes;
// [List] reads one snapshot.
package netwatch

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
)

// Part is something that can be watched, or several of them.
type Part uint8

// What can be watched.
const (
	Links Part = 1 << iota
	Addresses
	Routes

	All = Links | Addresses | Routes
)

// Snapshot is what there is at one time. It is immutable; parts that were not
// asked for are empty. Everything is sorted and without repetition, but the
// addresses of a link are in the kernel's order.
type Snapshot struct {
	Links     []Link
	Addresses []Address
	Defaults  []Route // routes of the main table to all addresses, or to half of them
	Others    []Route // the same of all other tables
	Local     []Route // routes to addresses of this machine, from the local table
}

// Link is a network interface.
type Link struct {
	Index  int
	Name   string
	Flags  net.Flags
	Bridge bool
}

// Address is an address of a link, with the length of its network's prefix.
type Address struct {
	Link   int
	Prefix netip.Prefix
}

// Route sends packets for a destination to a link.
type Route struct {
	Dst  netip.Prefix
	Link int
}

// Link returns the link with an index, and whether there is one.
func (s *Snapshot) Link(index int) (Link, bool) {
	i, ok := slices.BinarySearchFunc(s.Links, index, func(l Link, index int) int { return cmp.Compare(l.Index, index) })
	if !ok {
		return Link{}, false
	}
	return s.Links[i], true
}

func (s *Snapshot) equal(t *Snapshot) bool {
	return slices.Equal(s.Links, t.Links) && slices.Equal(s.Addresses, t.Addresses) &&
		slices.Equal(s.Defaults, t.Defaults) && slices.Equal(s.Others, t.Others) && slices.Equal(s.Local, t.Local)
}

func (s *Snapshot) sort() {
	slices.SortFunc(s.Links, func(a, b Link) int { return cmp.Compare(a.Index, b.Index) })
	slices.SortStableFunc(s.Addresses, func(a, b Address) int { return cmp.Compare(a.Link, b.Link) })
	for _, routes := range []*[]Route{&s.Defaults, &s.Others, &s.Local} {
		slices.SortFunc(*routes, Route.compare)
		*routes = slices.Compact(*routes)
	}
}

func (r Route) compare(o Route) int {
	return cmp.Or(r.Dst.Compare(o.Dst), cmp.Compare(r.Link, o.Link))
}
