// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/nat/region"
	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

type bindingKey struct {
	table ruleset.TableID
	addr  netip.Addr
}

// draft is a binding in the making.
type draft struct {
	first    *entry
	open     bool // to everybody, who may be in this machine alone
	outer    bool // to connections from outside
	withheld string
	targets  []netip.AddrPort
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

// draft adds what a share opens to the drafts.
func (c *Compiler) draft(drafts map[bindingKey]*draft, id slotID, s share) {
	r, withheld := s.Certain, ""
	if r.Empty() {
		r, withheld = s.Possible, s.doubt
	}
	addrs, inner := c.keys(r, id.v6)
	for _, addr := range addrs {
		why := withheld
		if why == "" {
			why = inner
		}
		if why == "" {
			why = c.limits(s, r, addr, id.v6)
		}
		k := bindingKey{s.rule.chain.table.id, addr}
		d := drafts[k]
		switch {
		case d == nil:
			d = &draft{first: s.entry, withheld: why}
			drafts[k] = d
		case d.open && why != "":
			continue // it is open without these packets
		case !d.open && why == "":
			*d = draft{first: s.entry}
		}
		if why == "" {
			d.open, d.outer = true, d.outer || s.act.hook == ruleset.HookPrerouting
		}
		if d.outer && s.act.hook == ruleset.HookOutput {
			continue // what others reach is what a client of the host is to reach
		}
		d.ranged = d.ranged || len(s.end.nat.addrs) >= rangeAddrs || s.end.nat.random
		for _, t := range s.end.nat.targets(addr, id.slot.Port, c.redirectedTo(addr, s.act.hook, id.v6)) {
			switch {
			case slices.Contains(d.targets, t):
			case len(d.targets) == maxDial:
				d.more = true
			default:
				d.targets = append(d.targets, t)
			}
		}
	}
}

// keys returns the addresses that packets of r are published for: the wildcard if
// they are for any destination and every own address that others reach is among
// them, else the own addresses that are. A rule for any destination that leaves
// only addresses that others do not reach, as a transparent proxy may, is withheld.
func (c *Compiler) keys(r region.Region, v6 bool) (keys []netip.Addr, withheld string) {
	addrs := region.Addrs(v6)
	to := addrs.None()
	for i := range r {
		if r[i].To&region.Local != 0 {
			to = addrs.Union(to, r[i].Daddr)
		}
	}
	if !region.Most(to, v6) {
		return c.localKeys(to, v6, maxKeys), ""
	}
	left := func(nodes []netip.Addr) []netip.Addr {
		nodes = slices.DeleteFunc(slices.Clone(nodes), func(a netip.Addr) bool { return !addrs.Contains(to, a) })
		return nodes[:min(len(nodes), maxKeys)]
	}
	nodes := c.nodes(v6)
	outer := c.outer(v6)
	switch in := left(outer); {
	case len(in) == len(outer):
		return []netip.Addr{wildcard(v6)}, ""
	case len(in) > 0:
		return in, ""
	}
	return left(nodes), "leaves out every address that other machines reach"
}

// outer returns the own addresses of a family on interfaces that carry a default
// route, or all if none does.
func (c *Compiler) outer(v6 bool) []netip.Addr { return c.host.outer[familyIndex(v6)] }

func wildcard(v6 bool) netip.Addr {
	if v6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// nodes returns the own addresses of a family but the loopback.
func (c *Compiler) nodes(v6 bool) []netip.Addr { return c.host.nodes[familyIndex(v6)] }

// redirectedTo returns the address that REDIRECT sends to: the first of the
// incoming interface, or the loopback for what begins here (nf_nat_redirect.c).
func (c *Compiler) redirectedTo(addr netip.Addr, hook uint8, v6 bool) netip.Addr {
	if hook != ruleset.HookPrerouting {
		return port.Loopback(addr)
	}
	if a := c.host.Redirect[familyIndex(v6)]; a.IsValid() {
		return a
	}
	if nodes := c.nodes(v6); len(nodes) > 0 {
		return nodes[0]
	}
	return port.Loopback(addr)
}

// limits says what keeps an address from being open to everybody, or "".
func (c *Compiler) limits(s share, r region.Region, addr netip.Addr, v6 bool) string {
	if s.m.clients != "" {
		return "limited to sources in " + s.m.clients
	}
	at := []netip.Addr{addr}
	if addr.IsUnspecified() {
		if at = c.outer(v6); len(at) == 0 {
			at = []netip.Addr{port.Loopback(addr)}
			if s.act.hook == ruleset.HookPrerouting {
				at[0] = addr
			}
		}
	}
	for _, a := range at {
		if why := c.limitsAt(s, r, a, v6); why != "" {
			return why
		}
	}
	return ""
}

// limitsAt is limits for one own address.
func (c *Compiler) limitsAt(s share, r region.Region, addr netip.Addr, v6 bool) string {
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
		if s.act.hook == ruleset.HookOutput || b.From&region.Remote != 0 && c.comesIn(b.In) {
			from = addrs.Union(from, b.Saddr)
		}
	}
	switch {
	case region.Most(from, v6):
		return ""
	case !region.Most(sources, v6):
		return "limited to source " + addrsText(sources, v6)
	case !remote:
		return "limited to local sources"
	}
	for _, n := range c.host.Uplinks {
		if !region.Names().Contains(interfaces, n) && region.Names().Contains(interfaces, unnamed) {
			return "excludes interface " + n + ", which carries the default route"
		}
	}
	return "limited to interface " + region.NamesText(interfaces)
}

// unnamed is the name of an interface that no rule names.
const unnamed = "\x01"

// comesIn reports whether packets of other machines come in over one of in.
func (c *Compiler) comesIn(in region.Set[string]) bool {
	if len(c.host.Uplinks) == 0 {
		return region.Names().Contains(in, unnamed)
	}
	return slices.ContainsFunc(c.host.Uplinks, func(n string) bool { return region.Names().Contains(in, n) })
}

// finish makes bindings of drafts.
func (c *Compiler) finish(id slotID, drafts map[bindingKey]*draft) []port.Binding {
	out := make([]port.Binding, 0, len(drafts))
	uses := make(map[useID]struct{})
	outer := false
	for _, d := range drafts {
		outer = outer || d.outer
	}
	for k, d := range drafts {
		if outer && d.open && !d.outer {
			d.withheld = "for programs of the guest alone, while others reach another address of it"
		}
		key := port.Key{Protocol: id.slot.Protocol, Address: k.addr, Port: id.slot.Port}
		b := port.Binding{
			Key:      key,
			Origin:   port.Origin{Source: port.SourceNAT, ID: k.table.String() + " " + key.String()},
			Withheld: d.withheld,
			Inner:    d.open && !d.outer,
			Maker:    d.first.rule.maker(),
			Detail:   port.LazyDetail(d.first.detail()),
		}
		b.Hints.Targets = c.served(d.targets)
		b.Rule = c.leadsTo(d)
		b.Dial, b.Doubt = c.dial(id, k.addr, d.targets)
		for _, t := range d.targets {
			uses[useID{slotID{id.v6, port.Slot{Protocol: id.slot.Protocol, Port: t.Port()}}, c.own(t.Addr())}] = struct{}{}
		}
		out = append(out, b)
	}
	c.index.depend(id, uses)
	slices.SortFunc(out, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	return out
}

// served returns targets as an owner is found by: what is sent to an own address
// is whoever's gets it on the loopback.
func (c *Compiler) served(targets []netip.AddrPort) []netip.AddrPort {
	out := make([]netip.AddrPort, 0, len(targets))
	for _, t := range targets {
		if slices.Contains(c.host.Nodes, t.Addr()) {
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
