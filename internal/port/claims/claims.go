// SPDX-License-Identifier: Apache-2.0

// Package claims decides which publication gets which host address. It is pure:
// the host, the listeners in the guest and the foreign peers all ask it, so that
// one set of publications looks the same everywhere.
//
// # Who wins
//
// A host wildcard (0.0.0.0 or ::) takes its port on all addresses of its family;
// otherwise two claims overlap if they name the same address. Claims are looked
// at in the order of precedence:
//
//  1. What asks for the port by itself or by a rule precedes what asks by a label (Yields).
//  2. The guest that came first precedes the others (a host may follow several).
//  3. What a guest publishes precedes what is only kept of it (Kept); of each the lower
//     Standing precedes.
//  4. The guest addresses 127.0.0.1 and ::1 precede a wildcard, and that any other.
//  5. The publication's key and the host address decide the rest.
//
// A claim is refused if it overlaps one of another server that was accepted
// before it. So the order in which claims arrive never matters.
//
// # Who shares
//
// Claims of one server never conflict with each other: those of one publication,
// and those of one guest with the same guest port and the same known owner or,
// without a known owner, the same NAT rule. One claim then serves the address
// for all of them: the first that asks for the wildcard, else the first that asks
// for the address. So a Service that is open on the wildcard, on the loopback and
// on a node address is active with all three.
//
// The publications of one owner may dial different sockets: a program can listen
// on two addresses with different content. At one host address only one of them
// can be served, and the user is told that the owner is reachable there, which is
// true. Different guest ports of one owner do conflict, for a client that a rule
// sends to one of them would reach another protocol.
//
// A wildcard that cannot be opened serves nobody: the other claims of its server are
// served each at its own address. Claims of other servers still lose to it.
package claims

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"

	"github.com/fairlead/fairlead/internal/port"
)

// Claim is one publication's wish for one host address.
type Claim struct {
	// Guest is the position of the guest in the order in which the guests came to
	// this port; 0 where there is only one guest.
	Guest int

	Key    port.Key
	Owner  port.Owner
	Target uint64         // see port.Fact
	Host   netip.AddrPort // port 0 asks for any free port and overlaps nothing

	// Unavailable says of a wildcard that it cannot be opened now.
	Unavailable bool

	// Kept says that the guest has not reported the publication again, and may not do so.
	// It serves no claim that is not kept.
	Kept bool

	Standing Standing

	// Yields says that a label of the owner asks for the host port: it is nobody's right.
	Yields bool
}

// Standing is why a publication has a host port. The lower one precedes.
type Standing uint8

// The reasons to have a host port.
const (
	Asked Standing = iota // a rule gives it this number in place of its own, or somebody asked for it by name
	Own                   // it is its own number
	Moved                 // it is instead of another number, which was in use
)

// StandingOf returns the standing of a publication that was not moved, and that somebody asked
// for by name or not.
func StandingOf(k port.Key, host netip.AddrPort, byName bool) Standing {
	if byName || k.Port != host.Port() {
		return Asked
	}
	return Own
}

// Of returns the claim of p to one host address.
func Of(p *port.Publication, host netip.AddrPort) Claim {
	return Claim{
		Key: p.Key, Owner: p.Owner, Target: p.Target, Host: host, Yields: p.Decision.Yields,
		Standing: StandingOf(p.Key, host, len(p.Demands()) > 0),
	}
}

// String names the publication, and its owner if it has a name.
func (c Claim) String() string { return Name(c.Key, "", c.Owner) }

// Name names a publication in a reason: `tcp 0.0.0.0:80 of guest "vm" ("web")`.
// Guest and the owner's name are left out if empty.
func Name(k port.Key, guest string, o port.Owner) string {
	s := k.String()
	if guest != "" {
		s += " of guest " + strconv.Quote(guest)
	}
	if o.Name != "" {
		s += " (" + strconv.Quote(o.Name) + ")"
	}
	return s
}

// Held is the reason of a conflict about an address that no program of the host has, but
// another publication or what else by describes.
func Held(at netip.AddrPort, by string) port.Reason {
	return port.Because(port.HeldBy, at.String(), by)
}

// Verdict is what became of a claim.
type Verdict struct {
	// Winner is the index of the claim that has the address: the claim's own if it
	// won.
	Winner int
	// Conflict says that the winner is another server. Without it the winner
	// serves the claim too.
	Conflict bool
}

// Decide returns one verdict for each claim. The winners do not overlap each
// other, except those beside an unavailable wildcard. It takes O(n log n) time.
func Decide(claims []Claim) []Verdict {
	order := make([]int, len(claims))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return compare(&claims[a], &claims[b]) })
	d := decision{claims: claims, verdicts: make([]Verdict, len(claims)), groups: make(map[group]*accepted)}
	for _, i := range order {
		d.add(i)
	}
	for i := range claims { // a wildcard may have replaced the winner later
		v := &d.verdicts[i]
		v.Winner = d.verdicts[v.Winner].Winner
	}
	return d.verdicts
}

// compare orders claims by precedence.
func compare(a, b *Claim) int {
	return cmp.Or(
		last(a.Yields, b.Yields),
		cmp.Compare(a.Guest, b.Guest),
		last(a.Kept, b.Kept),
		cmp.Compare(a.Standing, b.Standing),
		cmp.Compare(precedence(a.Key.Address), precedence(b.Key.Address)),
		a.Key.Compare(b.Key),
		a.Host.Compare(b.Host),
	)
}

// last orders what is so behind what is not.
func last(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// precedence orders guest addresses, lowest first. Only 127.0.0.1 and ::1 come
// before a wildcard: they are what "localhost" means in the guest.
func precedence(guest netip.Addr) int {
	switch {
	case guest == port.Loopback(guest):
		return 0
	case port.IsWildcard(guest):
		return 1
	}
	return 2
}

// Overlap reports whether listeners at a and b, of one protocol, exclude each
// other. A listener at :: takes IPv6 alone.
func Overlap(a, b netip.AddrPort) bool {
	return a.Port() == b.Port() && a.Port() != 0 && a.Addr().Is4() == b.Addr().Is4() &&
		(a.Addr() == b.Addr() || port.IsWildcard(a.Addr()) || port.IsWildcard(b.Addr()))
}

// server identifies who serves a claim.
type server struct {
	guest  int
	port   uint16
	owner  port.OwnerKind
	id     string
	space  string
	in     string // the cluster
	target uint64
	key    port.Key
	kept   bool
}

// serverOf returns the server of c. An owner without an id (a process in another
// pid namespace) is not known well enough to be the same as another.
func (c *Claim) serverOf() server {
	s := server{guest: c.Guest, port: c.Key.Port, kept: c.Kept}
	switch {
	case c.Owner.Kind != port.OwnerUnknown && c.Owner.ID != "":
		s.owner, s.id, s.space, s.in = c.Owner.Kind, c.Owner.ID, c.Owner.Namespace, c.Owner.Cluster
	case c.Target != 0:
		s.target = c.Target
	default:
		s.key = c.Key
	}
	return s
}

// Same reports whether two claims are of one server and can share an address.
func Same(a, b Claim) bool { return a.serverOf() == b.serverOf() }

// group is one port of one family: only claims of one group can overlap.
type group struct {
	port.Slot
	is4 bool
}

// accepted is what was accepted in a group. Its claims are named by their index.
type accepted struct {
	at       map[netip.Addr]int // winners by address; of a wildcard, it alone
	first    int                // the first winner
	firstOf  server
	other    int // the first winner of another server than firstOf, -1 if none
	wildcard int // the winner of the wildcard, -1 if none
}

type decision struct {
	claims   []Claim
	verdicts []Verdict
	groups   map[group]*accepted
}

// add decides about the next claim in the order of precedence.
func (d *decision) add(i int) {
	c := &d.claims[i]
	d.verdicts[i] = Verdict{Winner: i}
	if c.Host.Port() == 0 {
		return
	}
	f := group{port.Slot{Protocol: c.Key.Protocol, Port: c.Host.Port()}, c.Host.Addr().Is4()}
	a := d.groups[f]
	if a == nil {
		a = &accepted{at: make(map[netip.Addr]int), first: -1, other: -1, wildcard: -1}
		d.groups[f] = a
	}
	s := c.serverOf()
	if by, ok := d.foreign(a, c, s); ok {
		d.verdicts[i] = Verdict{Winner: by, Conflict: true}
		return
	}
	d.accept(a, i, s)
}

// foreign returns the first winner of another server that overlaps c.
func (d *decision) foreign(a *accepted, c *Claim, s server) (int, bool) {
	addr := c.Host.Addr()
	switch by, taken := a.at[addr]; {
	case a.wildcard >= 0:
		return a.wildcard, s != a.firstOf
	case port.IsWildcard(addr):
		if a.first >= 0 && s != a.firstOf {
			return a.first, true
		}
		return a.other, a.other >= 0
	default:
		return by, taken && s != d.claims[by].serverOf()
	}
}

// accept makes claim i a winner, or has a winner of the same server serve it.
func (d *decision) accept(a *accepted, i int, s server) {
	addr := d.claims[i].Host.Addr()
	if a.wildcard >= 0 && !d.claims[a.wildcard].Unavailable {
		d.verdicts[i].Winner = a.wildcard
		return
	}
	if by, taken := a.at[addr]; taken {
		d.verdicts[i].Winner = by
		return
	}
	if port.IsWildcard(addr) { // all winners so far are of this server
		if !d.claims[i].Unavailable {
			for _, by := range a.at {
				d.verdicts[by].Winner = i
			}
			clear(a.at)
		}
		a.first, a.wildcard = i, i
		a.firstOf = s
	}
	a.at[addr] = i
	switch {
	case a.first < 0:
		a.first, a.firstOf = i, s
	case a.other < 0 && s != a.firstOf:
		a.other = i
	}
}
