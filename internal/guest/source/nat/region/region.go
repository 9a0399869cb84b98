// SPDX-License-Identifier: Apache-2.0

// Package region is set algebra on packets: which of them a rule matches, and
// which are left for the rules after it. It knows nothing of rules.
//
// A Box is what one rule can ask of a packet: a product of sets, one for each
// field. A Region is a union of boxes. Union, intersection and difference are
// exact; the number of boxes is bounded, and what would need more is known by
// its Bounds alone.
package region

import (
	"net/netip"
	"slices"
)

// Bits of Box.Protocols.
const (
	TCP uint8 = 1 << iota
	UDP
	protocols = TCP | UDP
)

// Bits of Box.From and Box.To: whether a packet's source or destination is an
// address of this machine.
const (
	Local uint8 = 1 << iota
	Remote
	anywhere = Local | Remote
)

// Box is a product of sets: the packets whose every field is in the set for that
// field. All packets are of one address family and at one hook.
type Box struct {
	Protocols uint8 // TCP, UDP
	From, To  uint8 // Local, Remote
	Dport     Set[uint16]
	Daddr     Set[netip.Addr]
	Saddr     Set[netip.Addr]
	In, Out   Set[string] // interfaces
}

// All returns the box that holds every packet.
func All() Box { return Box{Protocols: protocols, From: anywhere, To: anywhere} }

// Empty reports whether b holds no packet.
func (b *Box) Empty() bool {
	return b.Protocols == 0 || b.From == 0 || b.To == 0 || b.Dport.Empty() || b.Daddr.Empty() || b.Saddr.Empty() ||
		b.In.Empty() || b.Out.Empty()
}

func (b *Box) all() bool {
	return b.Protocols == protocols && b.From == anywhere && b.To == anywhere && b.Dport.All() && b.Daddr.All() && b.Saddr.All() &&
		b.In.All() && b.Out.All()
}

// Space is the packets of one address family, and how many boxes a region of
// them may have.
type Space struct {
	V6       bool
	MaxBoxes int // 0: DefaultMaxBoxes
}

// DefaultMaxBoxes bounds the boxes of one region. Real rulesets need fewer than
// ten for a port.
const DefaultMaxBoxes = 64

func (sp Space) limit() int {
	if sp.MaxBoxes > 0 {
		return sp.MaxBoxes
	}
	return DefaultMaxBoxes
}

// And returns what both boxes hold.
func (sp Space) And(a, b Box) Box {
	addrs := Addrs(sp.V6)
	return Box{
		Protocols: a.Protocols & b.Protocols,
		From:      a.From & b.From,
		To:        a.To & b.To,
		Dport:     ports.Intersect(a.Dport, b.Dport),
		Daddr:     addrs.Intersect(a.Daddr, b.Daddr),
		Saddr:     addrs.Intersect(a.Saddr, b.Saddr),
		In:        names.Intersect(a.In, b.In),
		Out:       names.Intersect(a.Out, b.Out),
	}
}

// Overlap reports whether some packet is in both boxes.
func (sp Space) Overlap(a, b *Box) bool {
	addrs := Addrs(sp.V6)
	return a.Protocols&b.Protocols != 0 && a.From&b.From != 0 && a.To&b.To != 0 &&
		!ports.Disjoint(a.Dport, b.Dport) && !addrs.Disjoint(a.Daddr, b.Daddr) && !addrs.Disjoint(a.Saddr, b.Saddr) &&
		!names.Disjoint(a.In, b.In) && !names.Disjoint(a.Out, b.Out)
}

// Covers reports whether a holds every packet of b.
func (sp Space) Covers(a, b *Box) bool {
	addrs := Addrs(sp.V6)
	return b.Empty() || b.Protocols&^a.Protocols == 0 && b.From&^a.From == 0 && b.To&^a.To == 0 &&
		ports.Covers(a.Dport, b.Dport) && addrs.Covers(a.Daddr, b.Daddr) && addrs.Covers(a.Saddr, b.Saddr) &&
		names.Covers(a.In, b.In) && names.Covers(a.Out, b.Out)
}

// subtract appends to out the packets of a that are not in b, as disjoint boxes:
// for each field, those that differ in it and agree in the fields before.
func (sp Space) subtract(out []Box, a, b Box) []Box {
	if !sp.Overlap(&a, &b) {
		return append(out, a)
	}
	addrs := Addrs(sp.V6)
	if p := a.Protocols &^ b.Protocols; p != 0 {
		part := a
		part.Protocols = p
		out = append(out, part)
	}
	a.Protocols &= b.Protocols
	if f := a.From &^ b.From; f != 0 {
		part := a
		part.From = f
		out = append(out, part)
	}
	a.From &= b.From
	if t := a.To &^ b.To; t != 0 {
		part := a
		part.To = t
		out = append(out, part)
	}
	a.To &= b.To
	out, a.Dport = split(out, &ports, a, a.Dport, b.Dport, func(x *Box, s Set[uint16]) { x.Dport = s })
	out, a.Daddr = split(out, addrs, a, a.Daddr, b.Daddr, func(x *Box, s Set[netip.Addr]) { x.Daddr = s })
	out, a.In = split(out, &names, a, a.In, b.In, func(x *Box, s Set[string]) { x.In = s })
	out, a.Saddr = split(out, addrs, a, a.Saddr, b.Saddr, func(x *Box, s Set[netip.Addr]) { x.Saddr = s })
	out, _ = split(out, &names, a, a.Out, b.Out, func(x *Box, s Set[string]) { x.Out = s })
	return out
}

// split appends a with have-without-take for one field, if that holds anything,
// and returns what both hold.
func split[T any](out []Box, d *Domain[T], a Box, have, take Set[T], set func(*Box, Set[T])) ([]Box, Set[T]) {
	if take.All() {
		return out, have
	}
	if rest := d.Subtract(have, take); !rest.Empty() {
		set(&a, rest)
		out = append(out, a)
	}
	return out, d.Intersect(have, take)
}

// Region is a union of boxes, none of them empty. The zero value holds nothing.
// Regions are immutable.
type Region []Box

// Of returns the region of one box.
func Of(b Box) Region {
	if b.Empty() {
		return nil
	}
	return Region{b}
}

// Empty reports whether r holds no packet.
func (r Region) Empty() bool { return len(r) == 0 }

// Union returns what either holds. ok is false if that takes too many boxes; the
// result then holds some of it only.
func (sp Space) Union(a, b Region) (sum Region, ok bool) {
	if len(a) == 0 && len(b) <= sp.limit() {
		return b, true
	}
	sum, ok = slices.Clone(a), true
	for i := range b {
		switch {
		case slices.ContainsFunc(sum, func(x Box) bool { return sp.Covers(&x, &b[i]) }):
		case slices.ContainsFunc(sum, func(x Box) bool { return sp.sameButAddr(&x, &b[i]) }):
			at := slices.IndexFunc(sum, func(x Box) bool { return sp.sameButAddr(&x, &b[i]) })
			sum[at].Daddr = Addrs(sp.V6).Union(sum[at].Daddr, b[i].Daddr)
			sum[at].Saddr = Addrs(sp.V6).Union(sum[at].Saddr, b[i].Saddr)
		case len(sum) >= sp.limit():
			ok = false
		default:
			sum = append(sum, b[i])
		}
	}
	return sum, ok
}

// sameButAddr reports whether two boxes differ in one of their address fields at
// most, so that their union is a box.
func (sp Space) sameButAddr(a, b *Box) bool {
	addrs := Addrs(sp.V6)
	return a.Protocols == b.Protocols && a.From == b.From && a.To == b.To && ports.Equal(a.Dport, b.Dport) &&
		names.Equal(a.In, b.In) && names.Equal(a.Out, b.Out) && (addrs.Equal(a.Daddr, b.Daddr) || addrs.Equal(a.Saddr, b.Saddr))
}

// Intersect returns what both hold. ok is false if that takes too many boxes;
// the result then holds some of it only.
func (sp Space) Intersect(a, b Region) (both Region, ok bool) {
	for i := range a {
		for j := range b {
			x := sp.And(a[i], b[j])
			if x.Empty() {
				continue
			}
			if len(both) >= sp.limit() {
				return both, false
			}
			both = append(both, x)
		}
	}
	return both, true
}

// Subtract returns what a holds and b does not. ok is false if that takes too
// many boxes; the result then holds more, but nothing that a does not.
func (sp Space) Subtract(a, b Region) (rest Region, ok bool) {
	rest, ok = a, true
	for i := range b {
		if !slices.ContainsFunc(rest, func(x Box) bool { return sp.Overlap(&x, &b[i]) }) {
			continue
		}
		next := make(Region, 0, len(rest)+2)
		for j := range rest {
			next = sp.subtract(next, rest[j], b[i])
		}
		if len(next) > sp.limit() {
			ok = false
			continue
		}
		rest = next
	}
	return rest, ok
}

// OverlapsBox reports whether some packet of b is in r.
func (sp Space) OverlapsBox(r Region, b *Box) bool {
	return slices.ContainsFunc(r, func(x Box) bool { return sp.Overlap(&x, b) })
}

// Equal reports whether both hold the same packets. If that takes too many boxes
// to find out, the answer is no.
func (sp Space) Equal(a, b Region) bool {
	x, _ := sp.Subtract(a, b)
	y, _ := sp.Subtract(b, a)
	return x.Empty() && y.Empty()
}

// Bounds is what is known of a set of packets: it holds all of Certain, and
// nothing outside Possible.
type Bounds struct {
	Certain, Possible Region
}

// Exactly returns the bounds of a set that is known.
func Exactly(r Region) Bounds { return Bounds{r, r} }

// Without returns the bounds of a without b: certain is what is certainly in a
// and not possibly in b.
func (sp Space) Without(a, b Bounds) Bounds {
	certain, ok := sp.Subtract(a.Certain, b.Possible)
	if !ok {
		certain = nil
	}
	possible, _ := sp.Subtract(a.Possible, b.Certain)
	return Bounds{certain, possible}
}

// Or returns the bounds of what is in a or in b.
func (sp Space) Or(a, b Bounds) Bounds {
	certain, _ := sp.Union(a.Certain, b.Certain)
	if len(a.Possible) == 1 && a.Possible[0].all() {
		return Bounds{certain, a.Possible}
	}
	possible, ok := sp.Union(a.Possible, b.Possible)
	if !ok {
		possible = Of(All())
	}
	return Bounds{certain, possible}
}
