// SPDX-License-Identifier: Apache-2.0

package model

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

const (
	// ownerWait is how long a port waits for its process, and for an engine that is not
	// asked for lists.
	ownerWait = 10 * time.Second
	// reportTime is from when on a list counts that names no owner; two are needed.
	reportTime = time.Second
)

// entry is one binding, with what the reference notes about it.
type entry struct {
	port.Binding
	order       int  // of its source
	life        int  // another one when its key or its hints change
	provisional bool // it appeared while an engine was not live
}

func (e *entry) nat() bool      { return len(e.Hints.Targets) > 0 }
func (e *entry) declared() bool { return e.Owner.Kind >= port.OwnerService }

// level orders owners by how they are known.
type level int

const (
	unknown level = iota
	process
	target
	service
	container
)

func levelOf(k port.OwnerKind) level {
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

// reference is what was reported, and since when owners are expected.
type reference struct {
	now     time.Time
	clock   *clock                       // of what is first seen
	engines map[string]*facts            // which tell what they were asked
	entries map[string]map[string]*entry // by source and id
	state   map[string]string            // of each source: starting, live, stale
	facts   map[string]map[string]port.Owner
	stopped map[string]map[string]bool
	rules   ruleset

	liveSince time.Time // zero while an engine is not live
	changed   time.Time // of the last operation but sleep
	items     map[string]*item
	lives     int
	last      map[port.Key]port.Owner // owner of each publication, after the last step
	lost      map[int]*item           // bindings whose port lost its container or Service
	orphans   map[port.Key]bool       // ports whose Service was deleted, and which rules of kube-proxy keep
	named     map[int]bool            // NAT rules whose owner was known after the last step
	gone      map[string]bool         // addresses that NAT rules lead to, whose container stopped
}

// item is one reason to expect another owner.
type item struct {
	born time.Time
	over bool // nobody was named in time
}

// sources in the order in which they are added; engines have facts.
var (
	sources = []string{"socket", "nat", "docker", "containerd", "kube"}
	engines = []string{"docker", "containerd", "kube"}
)

func newReference(now time.Time, s *system) *reference {
	r := &reference{
		now: now, clock: s.clock, engines: s.facts, entries: map[string]map[string]*entry{}, state: map[string]string{}, facts: map[string]map[string]port.Owner{},
		stopped: map[string]map[string]bool{}, items: map[string]*item{}, last: map[port.Key]port.Owner{},
		lost: map[int]*item{}, named: map[int]bool{}, orphans: map[port.Key]bool{},
	}
	for _, s := range sources {
		r.entries[s], r.state[s] = map[string]*entry{}, "starting"
	}
	for _, e := range engines {
		r.facts[e], r.stopped[e] = map[string]port.Owner{}, map[string]bool{}
	}
	return r
}

func (r *reference) live() bool {
	return !slices.ContainsFunc(engines, func(e string) bool { return r.state[e] != "live" })
}

// set adds or replaces a binding.
func (r *reference) set(source string, b port.Binding) {
	old := r.entries[source][b.Origin.ID]
	b.Origin.Source = source
	switch {
	case old != nil:
		b.Since = old.Since
	case b.Since.IsZero():
		b.Since = r.clock.now()
	}
	r.lives++
	e := &entry{Binding: b, order: slices.Index(sources, source), life: r.lives, provisional: !r.live()}
	if old != nil && old.Key == e.Key && old.Hints.Equal(e.Hints) {
		e.life, e.provisional = old.life, old.provisional
	}
	r.entries[source][b.Origin.ID] = e
}

// setState notes that a source is live or stale.
func (r *reference) setState(source, state string) {
	r.state[source] = state
	switch {
	case !r.live():
		r.liveSince = time.Time{}
	case r.liveSince.IsZero():
		r.liveSince = r.now
		for _, set := range r.entries {
			for _, e := range set {
				e.provisional = false
			}
		}
	}
}

// answer is what engines say about hints.
type answer struct {
	owner  port.Owner
	known  bool
	stale  bool
	rivals []port.Owner
}

func sameContainer(a, b port.Owner) bool {
	if a.Kind == port.OwnerProcess && b.Kind == port.OwnerProcess {
		return a.Name == b.Name // rules see no more of them
	}
	return a.Kind == b.Kind && (a.ID == b.ID || a.Name == b.Name && a.Namespace == b.Namespace)
}

func addOwner(list []port.Owner, o port.Owner) []port.Owner {
	if slices.ContainsFunc(list, func(p port.Owner) bool { return sameContainer(p, o) }) {
		return list
	}
	return append(list, o)
}

// ask asks all engines about a fact: live ones are believed before stale ones.
func (r *reference) ask(key string) (a answer) {
	for _, stale := range []bool{false, true} {
		var named []port.Owner
		for _, e := range engines {
			if o, ok := r.facts[e][key]; ok && (r.state[e] == "stale") == stale {
				named = addOwner(named, o)
			}
		}
		switch len(named) {
		case 0:
			continue
		case 1:
			return answer{owner: named[0], known: true, stale: stale}
		}
		return answer{rivals: named, stale: stale}
	}
	return answer{}
}

// attribution is who engines say is behind an entry.
func (r *reference) attribution(e *entry) answer {
	switch {
	case len(e.Hints.Paths) > 0:
		return r.ask(e.Hints.Paths[0])
	case !e.nat():
		return answer{}
	}
	var all answer
	one := true
	for i, t := range e.Hints.Targets {
		a := r.ask(t.Addr().String())
		for _, o := range a.rivals {
			all.rivals = addOwner(all.rivals, o)
		}
		all.stale = all.stale || a.stale
		one = one && a.known && (i == 0 || sameContainer(a.owner, all.owner))
		if i == 0 {
			all.owner = a.owner
		}
	}
	all.known = one
	return all
}

// targetOwners are the owners that a NAT rule is known to lead to.
func (r *reference) targetOwners(e *entry) (out []port.Owner) {
	for _, t := range e.Hints.Targets {
		a := r.ask(t.Addr().String())
		if a.known {
			out = addOwner(out, a.owner)
		}
		for _, o := range a.rivals {
			out = addOwner(out, o)
		}
		if t.Addr().IsLoopback() {
			if ms := r.serving(e.Protocol, t); len(ms) > 0 {
				o, known := r.ownerOf(ms)
				out = addOwner(out, o)
				for _, o := range r.sharing(ms, known) {
					out = addOwner(out, o)
				}
			}
		}
	}
	return out
}

// sharing returns the owners of the sockets of a key that take connections. A relay, and a process
// that is not known, serve an owner who is known better than by a process.
func (r *reference) sharing(ms []*entry, known level) (out []port.Owner) {
	for _, e := range r.free(ms) {
		if o, l, _ := r.owner(e); e.Origin.Source == "socket" && (known <= process || !r.kubeProxy(e) && (l > process || o.Kind == port.OwnerProcess && !relay(e))) {
			out = append(out, o)
		}
	}
	return out
}

// unnamed reports whether a NAT rule leads to an address that no engine knows.
func (r *reference) unnamed(e *entry) bool {
	return slices.ContainsFunc(e.Hints.Targets, func(t netip.AddrPort) bool {
		a := r.ask(t.Addr().String())
		return !a.known && len(a.rivals) == 0 && !t.Addr().IsLoopback()
	})
}

// left reports whether a container at a target of a NAT rule stopped, and no other is
// known. While an engine is not live, that it knows a container no more does not say that
// the container stopped.
func (r *reference) left(e *entry) bool {
	if !r.unnamed(e) {
		return false
	}
	return r.gone[addressesOf(e)] || r.live() && slices.ContainsFunc(e.Hints.Targets, func(t netip.AddrPort) bool {
		return slices.ContainsFunc(engines, func(n string) bool { return r.stopped[n][t.Addr().String()] })
	})
}

// addressesOf names the addresses that a NAT rule leads to: what is known about them is
// known of every rule that leads to the same ones, at whatever port.
func addressesOf(e *entry) string {
	var all []netip.Addr
	for _, t := range e.Hints.Targets {
		all = append(all, t.Addr())
	}
	return fmt.Sprint(all)
}

// noteLeft remembers which rules were left.
func (r *reference) noteLeft() {
	gone := map[string]bool{}
	for _, e := range r.entries["nat"] {
		if r.left(e) {
			gone[addressesOf(e)] = true
		}
	}
	r.gone = gone
}

func (r *reference) withheld(e *entry) bool {
	return !e.Withheld.IsZero() || e.Maker == port.MakerCNI && r.left(e)
}

// idle reports whether an entry takes no connections: it is withheld, or it is the IPv4 half of a
// socket at ::, and a socket of IPv4 is preferred.
func (r *reference) idle(e *entry) bool {
	return r.withheld(e) || e.Mapped && slices.ContainsFunc(slices.Collect(maps.Values(r.entries["socket"])), func(o *entry) bool {
		return o.Key == e.Key && !o.Mapped && o.Withheld.IsZero()
	})
}

// slot returns the entries of a protocol and port in their order.
func (r *reference) slot(p port.Protocol, n uint16) (out []*entry) {
	for _, set := range r.entries {
		for _, e := range set {
			if e.Protocol == p && e.Port == n {
				out = append(out, e)
			}
		}
	}
	withheld := func(e *entry) int {
		if r.withheld(e) {
			return 1
		}
		return 0
	}
	slices.SortFunc(out, func(a, b *entry) int {
		return cmp.Or(a.Address.Compare(b.Address), withheld(a)-withheld(b), a.order-b.order,
			len(a.Origin.ID)-len(b.Origin.ID), strings.Compare(a.Origin.ID, b.Origin.ID))
	})
	return out
}

func at(all []*entry, a netip.Addr) (out []*entry) {
	for _, e := range all {
		if e.Address == a {
			out = append(out, e)
		}
	}
	return out
}

// serving returns the entries of the address whose socket gets what is sent to to.
func (r *reference) serving(p port.Protocol, to netip.AddrPort) []*entry {
	all := slices.DeleteFunc(r.slot(p, to.Port()), (*entry).nat)
	candidates := []netip.Addr{to.Addr(), everywhere(to.Addr())}
	for _, a := range candidates {
		ms := at(all, a)
		if slices.ContainsFunc(ms, func(e *entry) bool {
			return e.Origin.Source == "socket" && e.Withheld.IsZero()
		}) {
			return ms
		}
	}
	return nil
}

// owner returns who owns an entry, how that is known, and whether only by a stale engine.
func (r *reference) owner(e *entry) (port.Owner, level, bool) {
	if a := r.attribution(e); a.known {
		if e.nat() {
			return a.owner, target, a.stale
		}
		return a.owner, levelOf(a.owner.Kind), a.stale
	}
	if o, ok := r.redirectOwner(e); ok {
		return o, target, false
	}
	return e.Owner, levelOf(e.Owner.Kind), slices.Contains(engines, e.Origin.Source) && r.state[e.Origin.Source] == "stale"
}

func leaves(e *entry) bool {
	return slices.ContainsFunc(e.Hints.Targets, func(t netip.AddrPort) bool { return !t.Addr().IsLoopback() })
}

// redirectOwner is the one owner of all ports of this machine that a NAT rule leads to.
func (r *reference) redirectOwner(e *entry) (owner port.Owner, ok bool) {
	if leaves(e) {
		return owner, false
	}
	for i, t := range e.Hints.Targets {
		ms := r.serving(e.Protocol, t)
		if len(ms) == 0 {
			return port.Owner{}, false
		}
		o, l := r.ownerOf(ms)
		if l == unknown || i > 0 && !o.Same(owner) {
			return port.Owner{}, false
		}
		owner, ok = o, true
	}
	return owner, ok
}

// best returns the owner who is known best, live before stale.
func (r *reference) best(ms []*entry) (owner port.Owner, known level, stale bool) {
	for i, e := range ms {
		o, l, s := r.owner(e)
		if i == 0 || l > known || l == known && stale && !s {
			owner, known, stale = o, l, s
		}
	}
	return owner, known, stale
}

// free returns the entries of a key that are not withheld, all if all are.
func (r *reference) free(ms []*entry) []*entry {
	if !slices.ContainsFunc(ms, func(e *entry) bool { return !r.idle(e) }) {
		return ms
	}
	return slices.DeleteFunc(slices.Clone(ms), r.idle)
}

// owning returns the entries whose owners count for a key: of those that are withheld only
// what engines declare, if they declare nothing else, unless all are. kube-proxy's node ports on the loopback are the
// Service's, as what only NAT rules open on one address.
func (r *reference) owning(ms []*entry) []*entry {
	free := r.free(ms)
	claimed := slices.ContainsFunc(free, (*entry).declared)
	owning := slices.DeleteFunc(slices.Clone(ms), func(e *entry) bool { return (claimed || !e.declared()) && !slices.Contains(free, e) })
	k := ms[0].Key
	proxied := false
	for _, e := range owning {
		switch {
		case k.Address.IsUnspecified():
			return owning
		case e.nat():
		case r.kubeProxy(e):
			proxied = true
		default:
			return owning
		}
	}
	claims := slices.DeleteFunc(r.slot(k.Protocol, k.Port), func(e *entry) bool {
		return e.Owner.Kind != port.OwnerService || !e.Address.IsUnspecified() || e.Address.Is4() != k.Address.Is4() ||
			proxied && e.Origin.Source != "kube"
	})
	if len(claims) > 0 {
		return claims
	}
	return owning
}

// kubeProxy reports whether an entry is a socket of kube-proxy on the loopback, or of a program that
// has it in it, which its rules of the port tell.
func (r *reference) kubeProxy(e *entry) bool {
	o, _, _ := r.owner(e)
	return e.Address.IsLoopback() && !e.nat() && o.Kind == port.OwnerProcess && len(e.Hints.Paths) == 0 &&
		(e.Owner.Name == "kube-proxy" || slices.ContainsFunc(r.slot(e.Protocol, e.Port), func(o *entry) bool { return o.Maker == port.MakerKubeProxy }))
}

// ownerOf returns the owner of a key.
func (r *reference) ownerOf(ms []*entry) (owner port.Owner, known level) {
	owner, known, _ = r.best(r.owning(ms))
	if o, l, _ := r.best(ms); known == unknown && l == process {
		owner, known = o, l
	}
	return owner, known
}

// published is a publication as the reference has it.
type published struct {
	key         port.Key
	owner       port.Owner
	known       level
	rule        uint64
	entries     []*entry
	dial        []netip.AddrPort
	hidden      bool // another server has all that could be dialled
	rivals      []port.Owner
	leads       []port.Owner
	ownerItems  []string // why the owner may be another
	targetItems []string // why a NAT rule may lead to somebody else
}

// publications merges all that was reported.
func (r *reference) publications() map[port.Key]*published {
	out := map[port.Key]*published{}
	seen := map[port.Slot]bool{}
	for _, set := range r.entries {
		for _, e := range set {
			if s := e.Slot(); !seen[s] {
				seen[s] = true
				r.publishSlot(s, out)
			}
		}
	}
	return out
}

func (r *reference) publishSlot(s port.Slot, out map[port.Key]*published) {
	slot := r.slot(s.Protocol, s.Port)
	for _, e := range slot {
		if out[e.Key] == nil {
			out[e.Key] = r.publish(at(slot, e.Address), slot)
		}
	}
}

func (r *reference) allWithheld(p *published) bool {
	return p.hidden || !slices.ContainsFunc(p.entries, func(e *entry) bool { return !r.idle(e) })
}

func addNew(to, from []netip.AddrPort) []netip.AddrPort {
	for _, a := range from {
		if !slices.Contains(to, a) {
			to = append(to, a)
		}
	}
	return to
}

// publish merges the entries of one key.
func (r *reference) publish(ms, slot []*entry) *published {
	p := &published{key: ms[0].Key, entries: ms}
	p.owner, p.known = r.ownerOf(ms)
	free, owning := r.free(ms), r.owning(ms)
	p.rule = free[0].Target
	for _, e := range free {
		p.dial = addNew(p.dial, e.Dial)
		if e.Target != p.rule {
			p.rule = 0
		}
	}
	anyLive := slices.ContainsFunc(owning, func(e *entry) bool { _, l, stale := r.owner(e); return l == p.known && !stale })
	for _, e := range ms {
		for _, o := range r.attribution(e).rivals {
			p.rivals = addOwner(p.rivals, o)
		}
		for _, o := range r.targetOwners(e) {
			p.leads = addOwner(p.leads, o)
		}
	}
	for _, o := range r.sharing(ms, p.known) {
		p.leads = addOwner(p.leads, o)
	}
	for _, e := range owning {
		claimed := slices.ContainsFunc(owning, (*entry).declared)
		if o, l, stale := r.owner(e); claimed && l == p.known && l >= service && (!anyLive || !stale) {
			p.rivals = addOwner(p.rivals, o)
		}
	}
	r.hide(p, slot)
	p.ownerItems, p.targetItems = r.doubts(ms, p.known)
	for _, e := range slot {
		if e.nat() && e.Address != p.key.Address && diverts(e, p.dial) {
			known := p.known
			if known == container {
				known = target
			}
			own, other := r.doubt(e, known)
			for _, i := range append(own, other...) {
				if i == r.itemOf(e, "target") {
					i += diverting
				}
				p.targetItems = append(p.targetItems, i)
			}
			for _, o := range r.targetOwners(e) {
				p.leads = addOwner(p.leads, o)
			}
		}
	}
	return p
}

// hide removes what another server of the slot has for itself from what is dialled. A TCP
// server of all addresses is reached at another one of the loopback.
func (r *reference) hide(p *published, slot []*entry) {
	served := func(a netip.AddrPort) *entry {
		for _, e := range at(slot, a.Addr()) {
			if !r.withheld(e) && !e.nat() && slices.Contains(e.Dial, a) {
				return e
			}
		}
		return nil
	}
	var free []netip.AddrPort
	for _, d := range p.dial {
		switch e := served(d); {
		case e == nil || e.Address == p.key.Address:
			free = append(free, d)
		default:
			p.hidden = true
			if d.Addr() == netip.MustParseAddr("127.0.0.1") && p.key.Protocol == port.TCP {
				a := d
				for a = netip.AddrPortFrom(a.Addr().Next(), a.Port()); served(a) != nil; {
					a = netip.AddrPortFrom(a.Addr().Next(), a.Port())
				}
				free = append(free, a)
			}
		}
	}
	p.dial, p.hidden = free, p.hidden && len(free) == 0
}

// diverts reports whether a NAT rule applies to one of the addresses dialled.
func diverts(e *entry, dial []netip.AddrPort) bool {
	return slices.ContainsFunc(dial, func(d netip.AddrPort) bool {
		return d.Port() == e.Port && (d.Addr() == e.Address || e.Address.IsUnspecified() && d.Addr().Is4() == e.Address.Is4())
	})
}

// doubts returns why the owner of these entries may be another, and why a NAT rule
// may lead to somebody else.
func (r *reference) doubts(ms []*entry, known level) (own, other []string) {
	claimed := slices.ContainsFunc(ms, func(e *entry) bool { _, l, stale := r.owner(e); return l == container && !stale })
	for _, e := range ms {
		var o, t []string
		switch {
		case known < container:
			o, t = r.doubt(e, known)
		case r.stillProvisional(e) && !claimed:
			o, t = r.doubt(e, process)
		case r.unnamed(e):
			t = []string{r.itemOf(e, "target")}
		}
		own, other = append(own, o...), append(other, t...)
	}
	return own, other
}

// stillProvisional reports whether an entry appeared while an engine was not live, and
// may serve a container.
func (r *reference) stillProvisional(e *entry) bool {
	return e.provisional && !e.declared() && (e.nat() || len(e.Hints.Paths) > 0 || relay(e))
}

// unclaimed reports whether an entry is a rule for a Service.
func unclaimed(e *entry) bool {
	return e.Maker == port.MakerKubeProxy || e.Maker == port.MakerSwarm
}

// doubt is doubts for one entry.
func (r *reference) doubt(e *entry, known level) (own, other []string) {
	a := r.attribution(e)
	switch {
	case e.declared():
	case e.nat() && a.known:
		if r.stillProvisional(e) || unclaimed(e) && known < service {
			own = append(own, r.itemOf(e, "owner"))
		}
	case e.nat() && known >= service:
		if r.unnamed(e) {
			other = append(other, r.itemOf(e, "target"))
		}
	case e.nat():
		if leaves(e) {
			own = append(own, r.itemOf(e, "owner"))
		}
		for _, t := range e.Hints.Targets {
			if !t.Addr().IsLoopback() {
				continue
			}
			ms := r.serving(e.Protocol, t)
			if len(ms) == 0 { // who listens next has doubts of its own
				own = append(own, r.itemOf(e, "target")+nobodyListens)
				continue
			}
			_, l := r.ownerOf(ms)
			o, t := r.doubts(ms, l)
			for i := range o {
				o[i] += behindRedirect
			}
			own, other = append(own, o...), append(other, t...)
		}
	case a.known:
	default:
		if len(e.Hints.Paths) > 0 || known < target && (relay(e) || r.kubeProxy(e)) {
			own = append(own, r.itemOf(e, "owner"))
		}
		if known < target && e.Searching {
			own = append(own, r.itemOf(e, "owner")+search)
		}
	}
	return own, other
}

// relay reports whether a socket may serve a container that it is not in.
func relay(e *entry) bool { return e.Owner.Name == "docker-proxy" || e.Owner.Name == "kube-proxy" }

// nobodyListens marks the doubt about a redirect that leads nowhere. It lasts as long as the
// rule, and does not begin anew.
const nobodyListens = " nobody"

// search marks the doubt about a socket's process, of which engines know nothing.
const search = " search"

// behindRedirect marks the doubt about a socket that a NAT rule redirects to. It lasts as long
// as nobody names the socket's owner, whoever claims its port meanwhile, and begins anew when
// the port loses its owner.
const behindRedirect = " behind a redirect"

// diverting marks the doubt about a NAT rule for the ports that it diverts. It lasts as long
// as the rule, and begins anew when its owner is not known any more.
const diverting = " diverting"

// itemOf names a reason for doubt. What a rule leads to is one whether it may be the owner
// or somebody besides; but only a port that is its own waits for a container that stopped.
func (r *reference) itemOf(e *entry, what string) string {
	name := fmt.Sprint(e.Origin.Source, " ", e.Origin.ID, " ", e.life)
	if what == "owner" && r.left(e) {
		return name + " left"
	}
	return name
}

// step ends an operation: it notes which doubts began and ended, and returns what is
// published.
func (r *reference) step() map[port.Key]*published {
	r.noteLeft()
	for _, i := range r.lost {
		r.age("", i)
	}
	pubs := r.publications()
	present := map[string]bool{}
	for k, p := range pubs {
		old := r.last[k]
		if old.Kind >= port.OwnerService && p.owner.Kind < port.OwnerService {
			r.lose(p)
		}
		deleted := old.Kind == port.OwnerService && p.owner.Kind == port.OwnerContainer
		if deleted || r.orphans[k] {
			r.orphans[k] = p.known < service && slices.ContainsFunc(p.entries, func(e *entry) bool {
				return unclaimed(e) && r.attribution(e).known
			})
		}
		for _, i := range slices.Concat(p.ownerItems, p.targetItems) {
			present[i] = true
		}
	}
	for _, e := range r.entries["nat"] {
		present[r.itemOf(e, "target")+nobodyListens] = true
		present[r.itemOf(e, "target")+diverting] = true
		if r.unnamed(e) { // also while it waits for a container that stopped
			present[r.itemOf(e, "target")] = true
		}
		known := r.attribution(e).known
		if r.named[e.life] && !known {
			delete(r.items, r.itemOf(e, "target")+diverting)
		}
		r.named[e.life] = known
		if i := r.itemOf(e, "owner"); r.items[i] != nil && !r.attribution(e).known {
			present[i] = true // that a Service claims the port does not name what the rule leads to
		}
	}
	for _, e := range r.entries["socket"] {
		if !r.attribution(e).known {
			present[r.itemOf(e, "owner")+behindRedirect] = true
			present[r.itemOf(e, "owner")+search+behindRedirect] = true
		}
		if len(e.Hints.Paths) == 0 { // a second search for its process is no new doubt
			present[r.itemOf(e, "owner")] = true
			present[r.itemOf(e, "owner")+search] = true
		}
	}
	for name, i := range r.items {
		if !present[name] {
			delete(r.items, name)
		} else {
			r.age(name, i)
		}
	}
	for _, e := range r.entries["socket"] {
		wait, searched := r.items[r.itemOf(e, "owner")], r.items[r.itemOf(e, "owner")+search]
		if wait != nil && searched != nil && wait.over && !e.Searching {
			searched.over = true // a search that joins later does not prolong it
		}
	}
	for name := range present {
		if r.items[name] == nil {
			r.items[name] = &item{born: r.now}
		}
	}
	maps.DeleteFunc(r.orphans, func(k port.Key, _ bool) bool { return pubs[k] == nil })
	clear(r.last)
	for k, p := range pubs {
		r.last[k] = p.owner
	}
	return pubs
}

func (r *reference) age(name string, i *item) {
	if r.settled(i.born, strings.HasSuffix(name, search)) && !strings.HasSuffix(name, " left") {
		i.over = true
	}
}

// settled reports whether nobody was named in time for a doubt that was born then: a
// timed one lasts for ownerWait at least.
func (r *reference) settled(born time.Time, timed bool) bool {
	if r.liveSince.IsZero() {
		return false
	}
	from := later(born, r.liveSince)
	for _, f := range r.engines {
		lists, declined := f.answered(from.Add(reportTime))
		if lists >= 2 { // also if it declined after that
			continue
		}
		if !declined {
			return false
		}
		timed = true
	}
	return !timed || !from.Add(ownerWait).After(r.now)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// lose notes that a port lost its container or Service while others keep it.
func (r *reference) lose(p *published) {
	for _, e := range p.entries {
		r.lost[e.life] = &item{born: r.now}
		delete(r.items, r.itemOf(e, "target")+diverting)
		delete(r.items, r.itemOf(e, "owner")+behindRedirect)
		delete(r.items, r.itemOf(e, "owner")+search+behindRedirect)
	}
}

// pending reports whether one of the items is not over.
func (r *reference) pending(items []string) bool {
	return slices.ContainsFunc(items, func(i string) bool { return r.items[i] == nil || !r.items[i].over })
}

// lostRecently reports whether the port lost its owner, and had no time to get another.
func (r *reference) lostRecently(p *published) bool {
	return r.orphans[p.key] || p.owner.Kind < port.OwnerService && slices.ContainsFunc(p.entries, func(e *entry) bool {
		i := r.lost[e.life]
		return i != nil && !i.over
	})
}

// sameTerms reports whether a rule that does not name one owner denies the port for another. Only
// the containers of a Service, and the Services of a container, have the owner's decision.
func sameTerms(own, other port.Owner) bool {
	return other.Kind == port.OwnerProcess || own.Kind < port.OwnerService || own.Kind == other.Kind
}

// verdict is what may become of a publication.
type verdict struct {
	allow bool
	host  []netip.AddrPort
}

func (v verdict) equal(o verdict) bool { return v.allow == o.allow && slices.Equal(v.host, o.host) }

// decide returns what is allowed of a publication now, at most.
func (r *reference) decide(p *published) verdict {
	v := r.rules.decide(r, p, p.owner, false)
	if !v.allow {
		return v
	}
	if r.lostRecently(p) || r.pending(p.ownerItems) || r.pending(p.targetItems) {
		v = r.rules.decide(r, p, p.owner, true)
	}
	for _, o := range p.rivals {
		if !sameContainer(o, p.owner) && !r.rules.decide(r, p, o, false).equal(v) {
			return verdict{}
		}
	}
	for _, o := range p.leads {
		if sameContainer(o, p.owner) || o.Kind == port.OwnerUnknown && p.owner.Kind != port.OwnerProcess {
			continue
		}
		if by := r.rules.denies(r, p, o); by != nil && (by.namesOne() || sameTerms(p.owner, o)) {
			return verdict{}
		}
	}
	return v
}
