// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
)

// slots returns the bindings of a slot. They must not be changed.
type slots func(port.Slot) []member

// merged is a publication without a decision.
type merged struct {
	port.Publication

	doubt doubt
	known precedence // how well the owner is known
}

// compile merges the bindings of one slot into its publications, without
// decisions. The order of the members does not matter. Of other slots it looks at
// those that NAT rules send on to (see redirects).
func compile(ms []member, all slots) []merged {
	switch len(ms) {
	case 0:
		return nil
	case 1:
		return []merged{publication(ms, ms, nil, all)}
	}
	ms = slices.Clone(ms)
	slices.SortFunc(ms, member.compare)
	var nat []member
	for _, m := range ms {
		if m.nat() {
			nat = append(nat, m)
		}
	}
	var pubs []merged
	for start := 0; start < len(ms); {
		end := start + 1
		for end < len(ms) && ms[end].binding.Address == ms[start].binding.Address {
			end++
		}
		pubs = append(pubs, publication(ms[start:end], ms, nat, all))
		start = end
	}
	return pubs
}

// compare orders the members of a slot, by nothing that differs in an agent that starts now. The
// cookies of sockets are numbers.
func (m member) compare(o member) int {
	a, b := m.binding.Origin.ID, o.binding.Origin.ID
	return cmp.Or(
		m.binding.Address.Compare(o.binding.Address),
		// What is withheld is dialled last; the rest in the order of the sources.
		cmp.Compare(m.withheldRank(), o.withheldRank()),
		cmp.Compare(m.order, o.order),
		cmp.Compare(len(a), len(b)),
		strings.Compare(a, b),
	)
}

// precedence orders owners by how they are known, the preferred ones last: a
// container before a Service before a process, but a Service before the pods that
// kube-proxy's rules send to.
type precedence uint8

const (
	unknown   precedence = iota
	process              // made the socket
	target               // a NAT rule sends to it, or to the port that it listens on
	service              // claims the port
	container            // claims the port, or made the socket
)

// owner returns who owns a binding, and how well that is known.
func (m member) owner(all slots) (port.Owner, precedence) {
	if a := m.attribution; a != nil && a.known {
		if len(a.hints.Targets) > 0 {
			return a.owner, target
		}
		return a.owner, precedenceOf(a.owner.Kind)
	}
	if o, ok := m.listener(all); ok {
		return o, target
	}
	if o, ok := m.holder(); ok {
		return o, process
	}
	return *m.binding.Owner, precedenceOf(m.binding.Owner.Kind)
}

// best returns the owner who is best known of one or more bindings. Of two that are
// known as well, the one whom a live engine names is preferred.
func best(ms []member, all slots) (port.Owner, precedence) {
	owner, best := ms[0].owner(all)
	stale := ms[0].stale()
	for _, m := range ms[1:] {
		if o, s := m.owner(all); s > best || s == best && stale && !m.stale() {
			owner, best, stale = o, s, m.stale()
		}
	}
	return owner, best
}

// stale reports whether the engine that names the owner of a binding is.
func (m member) stale() bool {
	if a := m.attribution; a != nil && a.known {
		return a.answer.stale
	}
	s := m.source
	return s != nil && s.status.State == Stale && s.r.engines[s.name]
}

// others returns who else may serve the bindings of one key, of which lend lend it their
// servers: owners whom other engines claim it for, those behind NAT rules, and those of sockets
// that share it.
func others(ms, lend, slot []member, owner port.Owner, known precedence, all slots) (out []port.OtherOwner) {
	add := func(o port.Owner, rival bool) { out = appendOther(out, owner, port.OtherOwner{Owner: o, Rival: rival}) }
	for _, m := range ms {
		if a := m.attribution; a != nil {
			for _, o := range a.rivals {
				add(o, true)
			}
		}
		m.leadsTo(all, func(o port.Owner) { add(o, false) })
	}
	if owning := owners(ms, slot, all); slices.ContainsFunc(owning, member.declared) {
		live := slices.ContainsFunc(owning, func(m member) bool { _, p := m.owner(all); return p == known && !m.stale() })
		for _, m := range owning {
			if o, p := m.owner(all); p == known && p >= service && (!live || !m.stale()) {
				add(o, true)
			}
		}
	}
	servers(lend, known, all, func(o port.Owner) { add(o, false) })
	return out
}

// servers calls f with the owners of the sockets among the bindings that lend a key their
// servers. Each may serve it (SO_REUSEPORT, or SO_REUSEADDR of UDP). known is how well the owner
// of the key is known: if better than by its process, a relay and a process that is not known
// serve that owner.
func servers(lend []member, known precedence, all slots, f func(port.Owner)) {
	for _, m := range lend {
		if m.binding.Origin.Source != port.SourceSocket {
			continue
		}
		o, p := m.owner(all)
		if known <= process || !m.kubeProxy(all) && (p > process || o.Kind == port.OwnerProcess && !relays(o.Name)) {
			f(o)
		}
	}
}

// appendOther appends o if it is not owner, and not in the list. One who is both a rival and
// not is a rival. Rules see no more of a process than its name: the workers of a server are one.
// A process that is not known is another one than a process, and nobody beside other owners.
func appendOther(list []port.OtherOwner, owner port.Owner, o port.OtherOwner) []port.OtherOwner {
	if sameServer(o.Owner, owner) || o.Kind == port.OwnerUnknown && owner.Kind != port.OwnerProcess && owner.Held == nil {
		return list
	}
	for i := range list {
		if sameServer(list[i].Owner, o.Owner) {
			list[i].Rival = list[i].Rival || o.Rival
			return list
		}
	}
	if o.Kind == port.OwnerProcess {
		o.ID = ""
	}
	return append(list, o)
}

// sameServer reports whether rules take two owners for one.
func sameServer(a, b port.Owner) bool {
	switch {
	case a.Kind == port.OwnerProcess && b.Kind == port.OwnerProcess:
		return a.Name == b.Name
	case (a.Held == nil) != (b.Held == nil), a.Held != nil && a.Held.Process != b.Held.Process:
		return false
	}
	return sameContainer(a, b)
}

func precedenceOf(k port.OwnerKind) precedence {
	switch k {
	case port.OwnerContainer:
		return container
	case port.OwnerService:
		return service
	case port.OwnerProcess:
		return process
	}
	return unknown
}

func (m member) withheldRank() int {
	if m.withheld().IsZero() {
		return 0
	}
	return 1
}

// withheld returns why the binding alone is no reason to publish, no reason if it is one.
// Some engines leave the NAT rules of a container that stopped.
func (m member) withheld() port.Reason {
	b, a := m.binding, m.attribution
	if b.Withheld.IsZero() && b.Maker == port.MakerCNI && a != nil && a.left != "" {
		return port.Because(port.LeftBehind, a.left)
	}
	return b.Withheld
}

// withheldIn is withheld in the slot of the binding.
func (m member) withheldIn(slot []member) port.Reason {
	switch why := m.withheld(); {
	case !why.IsZero():
		return why
	case m.reserves(slot):
		return port.Because(port.Reserved)
	case m.shadowed(slot):
		return port.Because(port.Hidden, "a socket of IPv4")
	}
	return port.Reason{}
}

// shadowed reports whether this is the IPv4 half of a socket at ::, and a socket of IPv4 has the
// port, which the kernel prefers.
func (m member) shadowed(slot []member) bool {
	return m.binding.Mapped && slices.ContainsFunc(slot, func(o member) bool {
		b := o.binding
		return b.Address == m.binding.Address && b.Origin.Source == port.SourceSocket && !b.Mapped && o.withheld().IsZero() &&
			!slices.ContainsFunc(m.binding.Dial, func(d netip.AddrPort) bool { return !slices.Contains(b.Dial, d) })
	})
}

// reserves reports whether a socket only keeps others from a port that an engine publishes.
// It may take connections, also after the container has stopped, and serves none. What
// serves is a NAT rule, often of IPv4 alone.
func (m member) reserves(slot []member) bool {
	switch program(m.binding) {
	case "conmon":
		return true
	case "nerdctl", "sleep": // by which nerdctl holds it
		return m.attribution == nil || !m.attribution.container
	case "podman": // opens what conmon holds then
		return ruled(slot, port.MakerNetavark)
	case "dockerd":
		return m.binding.Address.IsUnspecified() && ruled(slot, port.MakerSwarm)
	}
	return false
}

// ruled reports whether a program has NAT rules in a slot.
func ruled(slot []member, by port.Maker) bool {
	return slices.ContainsFunc(slot, func(m member) bool { return m.binding.Maker == by })
}

// lenders returns the bindings of a key that lend it their servers, and all that comes with
// them. What is withheld lends nothing, unless all is, and a rule allows it.
func lenders(ms, slot []member) []member {
	return without(ms, func(m member) bool { return !m.withheldIn(slot).IsZero() })
}

// without returns the bindings of a key that drop does not choose, all if it chooses all.
func without(ms []member, drop func(member) bool) []member {
	if !slices.ContainsFunc(ms, drop) {
		return ms
	}
	if left := slices.DeleteFunc(slices.Clone(ms), drop); len(left) > 0 {
		return left
	}
	return ms
}

// owners returns the bindings that say who owns a key: its own that lend it their servers.
// If no engine declares one of these, what engines declare and withhold counts too, as rules
// may deny its owner. What kube-proxy alone opens on one address is the Service's that claims
// the port on all: its NAT rules open node ports on a node's addresses, and it may serve them
// itself on the loopback.
func owners(ms, slot []member, all slots) []member {
	owning := lenders(ms, slot)
	if len(owning) < len(ms) && !slices.ContainsFunc(owning, member.declared) {
		owning = without(ms, func(m member) bool { return !m.declared() && !m.withheldIn(slot).IsZero() })
	}
	addr := ms[0].binding.Address
	proxied := addr.IsLoopback() && slices.ContainsFunc(owning, func(m member) bool { return m.kubeProxy(all) })
	if addr.IsUnspecified() || slices.ContainsFunc(owning, func(m member) bool { return !m.nat() && !(proxied && m.kubeProxy(all)) }) {
		return owning
	}
	var claims []member
	for _, m := range slot {
		b := m.binding
		if b.Owner.Kind == port.OwnerService && b.Address.IsUnspecified() && b.Address.Is4() == addr.Is4() &&
			(!proxied || port.Family(b.Origin.Source) == "kube") {
			claims = append(claims, m)
		}
	}
	if len(claims) == 0 {
		return owning
	}
	slices.SortFunc(claims, member.compare)
	return claims
}

func (m member) declared() bool { return m.binding.Owner.Kind >= port.OwnerService }

// publication merges the bindings of one key, of all those of its slot. nat are the NAT
// rules of the slot.
func publication(ms, slot, nat []member, all slots) merged {
	owner, known := ownerOf(ms, slot, all)
	lend := lenders(ms, slot)
	p := merged{
		Publication: port.Publication{Fact: port.Fact{Key: ms[0].binding.Key, Owner: owner, Source: ms[0].binding.Origin.Source, Target: targetOf(lend)}},
		doubt:       uncertain(ms, owner.Kind, known, all),
		known:       known,
	}
	p.setAge(ms)
	p.SetNamed("", demands(ms))
	if len(ms) > 1 || ms[0].nat() || ms[0].attribution != nil {
		p.Others = others(ms, lend, slot, owner, known, all)
	}
	for _, m := range ms {
		b := m.binding
		p.Origins = append(p.Origins, port.OriginInfo{
			Origin: b.Origin, Detail: b.Detail, Withheld: m.withheldIn(slot), Mapped: b.Mapped, Inner: b.Inner, Paused: b.Paused, Maker: b.Maker, Doubt: b.Doubt,
			Program: program(b), Since: b.Since, Dial: b.Dial,
		})
	}
	for _, m := range lend {
		p.Contained = p.Contained || m.attribution != nil && m.attribution.container
		p.Dial = appendNew(p.Dial, m.binding.Dial)
	}
	p.passReserved(ms, slot, lend)
	p.hide(slot)
	for _, m := range nat {
		if m.binding.Address != p.Address && m.diverts(p.Dial) {
			p.doubt = p.doubt.and(m.targetDoubt(known, all))
			m.leadsTo(all, func(o port.Owner) { p.Others = appendOther(p.Others, owner, port.OtherOwner{Owner: o}) })
		}
	}
	return p
}

// demands returns by what users asked for a key.
func demands(ms []member) (list []string) {
	for _, m := range ms {
		if o := m.binding.Origin; o.Source == port.SourceDemand {
			if _, err := port.ParseDemand(o.ID); err == nil {
				list = append(list, o.ID)
			}
		}
	}
	return list
}

// passReserved removes from the addresses that are dialled those where a socket that serves
// nobody takes the connection, if others are left: what an engine declares names them too.
func (p *merged) passReserved(ms, slot, lend []member) {
	if len(lend) == len(ms) {
		return
	}
	has := func(ms []member, d netip.AddrPort, which func(member) bool) bool {
		return slices.ContainsFunc(ms, func(m member) bool { return which(m) && slices.Contains(m.binding.Dial, d) })
	}
	if dial := slices.DeleteFunc(slices.Clone(p.Dial), func(d netip.AddrPort) bool {
		return has(ms, d, func(m member) bool { return m.reserves(slot) }) && !has(lend, d, member.nat)
	}); len(dial) > 0 {
		p.Dial = dial
	}
}

// nat reports whether the binding is a NAT rule.
func (m member) nat() bool { return len(m.binding.Hints.Targets) > 0 }

// diverts reports whether a NAT rule applies to one of the addresses that are dialled.
func (m member) diverts(dial []netip.AddrPort) bool {
	b := m.binding
	return slices.ContainsFunc(dial, func(d netip.AddrPort) bool {
		a := d.Addr().Unmap()
		return d.Port() == b.Port && (a.WithZone("") == b.Address.WithZone("") || b.Address.IsUnspecified() && a.Is4() == b.Address.Is4())
	})
}

// program returns the name of the process that owns a socket, "" if it is not known.
func program(b *kept) string {
	if b.Owner.Kind != port.OwnerProcess {
		return ""
	}
	return b.Owner.Name
}

// ownerOf returns the owner of a key, and how well it is known.
func ownerOf(ms, slot []member, all slots) (port.Owner, precedence) {
	owning := owners(ms, slot, all)
	owner, known := best(owning, all)
	if known == unknown && len(owning) < len(ms) { // a process that only holds the port is better than none
		if o, p := best(ms, all); p == process {
			return o, p
		}
	}
	return owner, known
}

// kubeProxy reports whether a socket of the loopback is kube-proxy's: of root's process on this
// machine, in no container, or in its pod. Where another program has kube-proxy in it, as k3s,
// its NAT rules of the port tell.
func (m member) kubeProxy(all slots) bool {
	b := m.binding
	if m.nat() || b.Hints.User != 0 || !b.Address.IsLoopback() || program(b) != "kube-proxy" && !ruled(all(b.Slot()), port.MakerKubeProxy) {
		return false
	}
	o, _ := m.owner(all)
	contained := m.attribution != nil && m.attribution.container
	return o.Kind == port.OwnerProcess && !contained || o.Namespace == "kube-system" && strings.HasPrefix(o.Name, "kube-proxy")
}

// targetOf returns Fact.Target.
func targetOf(ms []member) uint64 {
	target := ms[0].binding.Target
	if slices.ContainsFunc(ms[1:], func(m member) bool { return m.binding.Target != target }) {
		return 0
	}
	return target
}

// appendNew returns to with what of from is not in it. It may share the memory
// of either.
func appendNew(to, from []netip.AddrPort) []netip.AddrPort {
	if len(to) == 0 && len(from) == 1 {
		return slices.Clip(from)
	}
	for _, a := range from {
		if !slices.Contains(to, a) {
			to = append(to, a)
		}
	}
	return to
}
