// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
)

type bindingKey struct {
	table ruleset.TableID
	addr  netip.Addr
}

// draft is a binding in the making.
type draft struct {
	first    *entry
	free     bool // for every client, who may be on this machine alone
	external bool // for every client on other machines
	withheld port.Reason
	order    string // why it is not certain that its rule is the first
	targets  []netip.AddrPort
	lead     int  // how many of targets are of its rule; the others are of balancers after it
	more     bool // than there is room for in targets
	ranged   bool // a rule sends to a range, of which targets has the first ones
}

// slotBindings works out one port of one protocol and family.
func (c *Compiler) slotBindings(id slotID) []port.Binding {
	if len(c.index.slots[id]) == 0 {
		c.index.depend(id, nil)
		return nil
	}
	drafts := make(map[bindingKey]*draft)
	for _, hook := range []uint8{ruleset.HookPrerouting, ruleset.HookOutput} {
		list, crowded := c.hookEntries(id, hook)
		if !slices.ContainsFunc(list, (*entry).publishable) {
			continue
		}
		for _, s := range c.shares(id, list, crowded) {
			if s.publishable() {
				c.draft(drafts, id, s)
			}
		}
	}
	return c.finish(id, drafts)
}

// publishable reports whether e sends packets to a server that is known.
func (e *entry) publishable() bool {
	return e.end.kind == endNat && e.problem == "" && e.end.nat != nil
}

// draft adds what a share opens to the drafts: what it certainly gets, and withheld
// the other addresses for which it may get packets.
func (c *Compiler) draft(drafts map[bindingKey]*draft, id slotID, s share) {
	certain := c.keys(s.Certain, id.v6)
	for _, addr := range certain.addrs {
		c.draftAt(drafts, id, s, s.Certain, addr, certain.withheld)
	}
	if s.doubt.IsZero() {
		return
	}
	for _, addr := range c.keys(s.Possible, id.v6).addrs {
		if !slices.Contains(certain.addrs, addr) && !slices.ContainsFunc(certain.addrs, netip.Addr.IsUnspecified) {
			c.draftAt(drafts, id, s, s.Possible, addr, s.doubt)
		}
	}
}

// draftAt adds what packets r of a share open at one address. The wildcard is split
// where some of its addresses are limited and others are not.
func (c *Compiler) draftAt(drafts map[bindingKey]*draft, id slotID, s share, r region.Region, addr netip.Addr, withheld port.Reason) {
	if addr.IsUnspecified() && len(c.reachable(id.v6)) == 0 {
		withheld = cmp.Or(c.limit(s, r, addr, id.v6), withheld)
	}
	if !withheld.IsZero() {
		c.merge(drafts, id, s, r, addr, withheld)
		return
	}
	if !addr.IsUnspecified() {
		c.merge(drafts, id, s, r, addr, c.limit(s, r, addr, id.v6))
		return
	}
	reachable := c.reachable(id.v6)
	switch {
	case len(reachable) > 0:
	case s.act.hook == ruleset.HookPrerouting:
		reachable = []netip.Addr{addr}
	default:
		reachable = []netip.Addr{port.Loopback(addr)}
	}
	if reachable = reachable[:min(len(reachable), maxKeys)]; c.uniform(r, s.act.hook, id.v6) {
		reachable = reachable[:1]
	}
	first := c.limit(s, r, reachable[0], id.v6)
	if !slices.ContainsFunc(reachable[1:], func(a netip.Addr) bool { return c.limit(s, r, a, id.v6).IsZero() != first.IsZero() }) {
		c.merge(drafts, id, s, r, addr, first)
		return
	}
	for _, a := range reachable {
		c.merge(drafts, id, s, r, a, c.limit(s, r, a, id.v6))
	}
}

// merge adds a share's packets r to the draft of one address.
func (c *Compiler) merge(drafts map[bindingKey]*draft, id slotID, s share, r region.Region, addr netip.Addr, why port.Reason) {
	k := bindingKey{s.rule.chain.table.id, addr}
	d := drafts[k]
	switch {
	case d == nil:
		d = &draft{first: s.entry, withheld: why, order: s.order}
		drafts[k] = d
	case d.free && !why.IsZero():
		return // it is open without these packets
	case !d.free && why.IsZero():
		*d = draft{first: s.entry, order: s.order}
	case !d.free && (why != d.withheld || !d.first.m.maybe):
		return // another server, for other clients
	}
	if why.IsZero() {
		d.free, d.external = true, d.external || s.act.hook == ruleset.HookPrerouting
	}
	if d.external && s.act.hook == ruleset.HookOutput {
		return // what others reach is what a client of the host is to reach
	}
	d.order = cmp.Or(d.order, s.order)
	d.ranged = d.ranged || len(s.end.nat.addrs) >= rangeAddrs || s.end.nat.random
	for _, t := range s.end.nat.targets(addr, id.slot.Port, c.redirectedTo(r, addr, s.act.hook, id.v6)) {
		switch {
		case slices.Contains(d.targets, t):
		case len(d.targets) == maxDial:
			d.more = true
		default:
			d.targets = append(d.targets, t)
			if s.rule == d.first.rule {
				d.lead = len(d.targets)
			}
		}
	}
}

// keys are addresses to publish a port at.
type keys struct {
	addrs    []netip.Addr
	withheld port.Reason
}

// keys returns the addresses that packets of r are published for: the wildcard if
// they are for any destination and every own address that other machines reach is
// among them, else the own addresses that are. A rule for any destination that
// leaves only addresses that they do not reach, as a transparent proxy may, is withheld,
// and so is one of a machine that has no address yet.
func (c *Compiler) keys(r region.Region, v6 bool) keys {
	addrs := region.Addrs(v6)
	to := addrs.None()
	for i := range r {
		if r[i].To&region.Local != 0 {
			to = addrs.Union(to, r[i].Daddr)
		}
	}
	nodes, reachable := c.nodes(v6), c.reachable(v6)
	// A machine that has no address at all yet is taken to get one of each family.
	if len(nodes) == 0 && len(c.host.Nodes) > 0 || !region.Most(to, v6) {
		if in := c.localKeys(to, v6); len(in) > 0 || !region.Most(to, v6) {
			return keys{addrs: in}
		}
		return keys{[]netip.Addr{wildcard(v6)}, port.Because(port.NoAddress)}
	}
	if !addrs.Meets(c.host.reachableSet[familyIndex(v6)], to.Complement()) {
		return keys{addrs: []netip.Addr{wildcard(v6)}}
	}
	left := func(nodes []netip.Addr) []netip.Addr {
		nodes = slices.DeleteFunc(slices.Clone(nodes), func(a netip.Addr) bool { return !addrs.Contains(to, a) })
		return nodes[:min(len(nodes), maxKeys)]
	}
	if in := left(reachable); len(in) > 0 {
		return keys{addrs: in}
	}
	return keys{left(nodes), port.Because(port.LeavesOutReached)}
}

// reachable returns the own addresses of a family on uplinks, or all if none is.
func (c *Compiler) reachable(v6 bool) []netip.Addr { return c.host.reachable[familyIndex(v6)] }

func wildcard(v6 bool) netip.Addr {
	if v6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// nodes returns the own addresses of a family but the loopback.
func (c *Compiler) nodes(v6 bool) []netip.Addr { return c.host.nodes[familyIndex(v6)] }

// redirectedTo returns the addresses that REDIRECT sends packets of r for addr to:
// of each incoming interface the first, or the loopback for what begins here
// (nf_nat_redirect.c). Uplinks come first.
func (c *Compiler) redirectedTo(r region.Region, addr netip.Addr, hook uint8, v6 bool) []netip.Addr {
	if hook != ruleset.HookPrerouting {
		return []netip.Addr{port.Loopback(addr)}
	}
	in := region.Names().None()
	for i := range r {
		if addr.IsUnspecified() || region.Addrs(v6).Contains(r[i].Daddr, addr) {
			in = region.Names().Union(in, r[i].In)
		}
	}
	primary := func(links []string) (out []netip.Addr) {
		for _, n := range links {
			a := c.host.Primary[n][familyIndex(v6)]
			if a.IsValid() && region.Names().Contains(in, n) && !slices.Contains(out, a) {
				out = append(out, a)
			}
		}
		return out
	}
	if out := primary(c.host.UplinksOf(v6)); len(out) > 0 {
		return out
	}
	if out := primary(slices.Sorted(maps.Keys(c.host.Primary))); len(out) > 0 {
		return out[:1]
	}
	if nodes := c.nodes(v6); len(nodes) > 0 {
		return nodes[:1]
	}
	return []netip.Addr{port.Loopback(addr)}
}

// uniform reports whether packets of r are the same for every own address that
// other machines reach. Connections of this machine to these have different sources.
func (c *Compiler) uniform(r region.Region, hook uint8, v6 bool) bool {
	addrs, reachableSet := region.Addrs(v6), c.host.reachableSet[familyIndex(v6)]
	return !slices.ContainsFunc(r, func(b region.Box) bool {
		return hook == ruleset.HookOutput && !b.Saddr.All() || addrs.Meets(reachableSet, b.Daddr) && addrs.Meets(reachableSet, b.Daddr.Complement())
	})
}

// limit says what keeps an own address from being open to every client, no reason if nothing does.
func (c *Compiler) limit(s share, r region.Region, addr netip.Addr, v6 bool) port.Reason {
	if s.m.clients != "" {
		return port.Because(port.FromList, s.m.clients)
	}
	addrs := region.Addrs(v6)
	from := addrs.None()
	sources, interfaces := addrs.None(), region.Names().None()
	remote := false
	for i := range r {
		b := &r[i]
		if !addrs.Contains(b.Daddr, addr) {
			continue
		}
		sources = addrs.Union(sources, b.Saddr)
		interfaces = region.Names().Union(interfaces, b.In)
		remote = remote || b.From&region.Remote != 0
		if s.act.hook == ruleset.HookOutput || b.From&region.Remote != 0 && c.comesIn(b.In, v6) {
			from = addrs.Union(from, b.Saddr)
		}
	}
	mostly := region.Most(from, v6)
	switch {
	case mostly && s.act.hook == ruleset.HookOutput && !c.comesFrom(from, addr, v6):
		return port.Because(port.FromSources, addrsText(from, v6))
	case mostly:
		return port.Reason{}
	case !region.Most(sources, v6):
		return port.Because(port.FromSources, addrsText(sources, v6))
	case !remote:
		return port.Because(port.FromHere)
	}
	for _, n := range c.host.UplinksOf(v6) {
		if !region.Names().Contains(interfaces, n) && region.Names().Contains(interfaces, unnamed) {
			return port.Because(port.WithoutUplink, n)
		}
	}
	return port.Because(port.OnInterface, region.NamesText(interfaces))
}

// comesFrom reports whether sources has all that a connection of this machine to an
// own address may have.
func (c *Compiler) comesFrom(sources region.Set[netip.Addr], addr netip.Addr, v6 bool) bool {
	return addr.IsUnspecified() ||
		!slices.ContainsFunc(c.sourcesTo(addr), func(a netip.Addr) bool { return !region.Addrs(v6).Contains(sources, a) })
}

// sourcesTo returns the sources that a connection of this machine to an own address that
// other machines reach may have: that address or, in IPv4, the first one of its interface.
func (c *Compiler) sourcesTo(addr netip.Addr) []netip.Addr {
	own := []netip.Addr{addr}
	if addr.Is6() || !slices.Contains(c.reachable(false), addr) {
		return own
	}
	for _, link := range c.host.UplinksOf(false) {
		if a := c.host.Primary[link][familyIndex(false)]; a.IsValid() {
			own = append(own, a)
		}
	}
	return own
}

// unnamed is the name of an interface that no rule names.
const unnamed = "\x01"

// comesIn reports whether packets of other machines come in over one of in.
func (c *Compiler) comesIn(in region.Set[string], v6 bool) bool {
	if len(c.host.UplinksOf(v6)) == 0 { // it may get some
		return region.Names().Contains(in, unnamed)
	}
	return slices.ContainsFunc(c.host.UplinksOf(v6), func(n string) bool { return region.Names().Contains(in, n) })
}

// finish makes bindings of drafts.
func (c *Compiler) finish(id slotID, drafts map[bindingKey]*draft) []port.Binding {
	out := make([]port.Binding, 0, len(drafts))
	uses := make(map[useID]struct{})
	external, free, elsewhere := false, false, ""
	for _, d := range drafts {
		external, free = external || d.external, free || d.free
	}
	if free && !external {
		elsewhere = c.elsewhere(id)
	}
	for k, d := range drafts {
		if external && d.free && !d.external {
			d.withheld = port.Because(port.ForTheGuest)
		}
		key := port.Key{Protocol: id.slot.Protocol, Address: k.addr, Port: id.slot.Port}
		b := port.Binding{
			Key:      key,
			Origin:   port.Origin{Source: port.SourceNAT, ID: k.table.String() + " " + key.String()},
			Withheld: d.withheld,
			Inner:    d.free && !d.external,
			Maker:    d.first.rule.maker(),
			Detail:   port.LazyDetail(d.first.detail()),
		}
		b.Hints.Targets = c.served(d.targets)
		b.Target = c.leadsTo(d)
		b.Dial, b.Doubt = c.dial(id, k.addr, d.targets, d.lead)
		b.Doubt = cmp.Or(b.Doubt, d.order)
		if d.free {
			b.Doubt = cmp.Or(b.Doubt, elsewhere)
		}
		b.Doubt = cmp.Or(b.Doubt, c.crosses(k.addr, d))
		for _, t := range d.targets {
			own := c.own(t.Addr())
			uses[useID{slotID: slotID{id.v6, port.Slot{Protocol: id.slot.Protocol, Port: t.Port()}}, own: own}] = struct{}{}
			if !own {
				uses[useOf(t.Addr())] = struct{}{}
			}
		}
		out = append(out, b)
	}
	c.index.depend(id, uses)
	slices.SortFunc(out, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	return out
}

// crosses says why what a draft at addr leads to gets no packets: IPv4 drops those between a
// loopback address and another machine unless route_localnet is set (ip_route_input_slow,
// Linux 6.18), and IPv6 always does (RFC 4291, section 2.5.3).
func (c *Compiler) crosses(addr netip.Addr, d *draft) string {
	const dropped = "the kernel drops packets between a loopback address and another machine"
	switch {
	case !slices.ContainsFunc(d.targets, func(t netip.AddrPort) bool {
		return t.Addr().IsLoopback() && d.external || addr.IsLoopback() && !c.own(t.Addr())
	}):
		return ""
	case addr.Is4():
		return "none, unless route_localnet is set: " + dropped
	}
	return "none: " + dropped
}

// elsewhere says why connections of other machines may lead to another server than
// those of this machine, where only the output hook opens the slot.
func (c *Compiler) elsewhere(id slotID) string {
	list, crowded := c.hookEntries(id, ruleset.HookPrerouting)
	if crowded {
		return "too many rules of the prerouting hook are for its port"
	}
	to := c.nodes(id.v6)
	if len(to) == 0 {
		to = []netip.Addr{wildcard(id.v6)}
	}
	for _, s := range c.shares(id, list, false) {
		unsure := s.problem != "" || s.publishable() && !s.doubt.IsZero()
		if unsure && slices.ContainsFunc(to, func(a netip.Addr) bool { return c.limit(s, s.Possible, a, id.v6).IsZero() }) {
			return "a rule of the prerouting hook may take connections of other machines: " + s.rule.text()
		}
	}
	return ""
}

// served returns targets as an owner is found by: what is sent to an own address
// is whoever's gets it on the loopback.
func (c *Compiler) served(targets []netip.AddrPort) []netip.AddrPort {
	out := make([]netip.AddrPort, 0, len(targets))
	for _, t := range targets {
		if _, node := c.host.node[t.Addr()]; node {
			t = netip.AddrPortFrom(port.Loopback(t.Addr()), t.Port())
		}
		if !slices.Contains(out, t) {
			out = append(out, t)
		}
	}
	return out
}

func addrsText(s region.Set[netip.Addr], v6 bool) string {
	var out []string
	for i, r := range region.Addrs(v6).Spans(s) {
		if i == 4 {
			out = append(out, "…")
			break
		}
		out = append(out, ruleset.AddrRange{First: r.Lo, Last: r.Hi}.String())
	}
	return strings.Join(out, ", ")
}
