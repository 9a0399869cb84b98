// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/source/nat/ruleset"
)

func (c *Compiler) publish() port.Change {
	c.index.spread()
	var ch port.Change
	for id := range c.index.dirtySlots {
		now := c.slotBindings(id)
		was := c.published[id]
		for _, b := range was {
			if !slices.ContainsFunc(now, func(n port.Binding) bool { return n.Origin == b.Origin }) {
				ch.Drop = append(ch.Drop, b.Origin)
			}
		}
		for _, b := range now {
			if !slices.ContainsFunc(was, func(w port.Binding) bool { return sameBinding(w, b) }) {
				ch.Put = append(ch.Put, b)
			}
		}
		c.count += len(now) - len(was)
		if len(now) > 0 {
			c.published[id] = now
		} else {
			delete(c.published, id)
		}
	}
	clear(c.index.dirtySlots)
	slices.SortFunc(ch.Put, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	slices.SortFunc(ch.Drop, func(a, b port.Origin) int { return cmp.Compare(a.ID, b.ID) })
	return ch
}

func sameBinding(a, b port.Binding) bool {
	return a.Origin == b.Origin && a.Key == b.Key && a.Withheld == b.Withheld && a.Inner == b.Inner && a.Maker == b.Maker && a.Detail.Equal(b.Detail) &&
		slices.Equal(a.Dial, b.Dial) && a.Hints.Equal(b.Hints)
}

// Incomplete reports whether the last commit needed a set whose elements were not
// read, because no packet could get there before.
func (c *Compiler) Incomplete() bool { return c.missing }

// Counts returns how many bindings there are, and how many rules were evaluated
// since the start.
func (c *Compiler) Counts() (bindings, evaluated int) { return c.count, c.evals }

// Bindings returns everything that is published, sorted by origin.
func (c *Compiler) Bindings() []port.Binding {
	out := []port.Binding{}
	for _, b := range c.published {
		out = append(out, b...)
	}
	slices.SortFunc(out, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	return out
}

// hookEntries returns the entries that packets for a slot meet at a hook, in order.
func (c *Compiler) hookEntries(id slotID, hook uint8) (list []*entry, crowded bool) {
	bit := protoBit(byte(id.slot.Protocol))
	wide := c.index.wide[wideID{id.v6, hook}]
	crowded = len(wide) > maxWide
	if !crowded {
		for _, e := range wide {
			if e.m.proto&bit != 0 && portOrder.contains(e.m.dport, id.slot.Port) {
				list = append(list, e)
			}
		}
	}
	for _, e := range c.index.slots[id] {
		if e.act.hook == hook {
			list = append(list, e)
		}
	}
	slices.SortFunc(list, (*entry).before)
	return list, crowded
}

type bindingKey struct {
	table ruleset.TableID
	addr  netip.Addr
}

// draft is a binding before it is known where the port is dialled.
type draft struct {
	first    *entry // that packets meet, of those that nothing limits if there are any
	free     bool   // nothing limits it
	outer    bool   // connections from outside meet it
	withheld string
	targets  []netip.AddrPort
}

// slotBindings works out one port of one protocol and family.
func (c *Compiler) slotBindings(id slotID) []port.Binding {
	if len(c.index.slots[id]) == 0 {
		return nil
	}
	drafts := make(map[bindingKey]*draft)
	var output []*entry
	for _, hook := range []uint8{ruleset.HookPrerouting, ruleset.HookOutput} {
		list, crowded := c.hookEntries(id, hook)
		if hook == ruleset.HookOutput {
			output = list
		}
		if len(list) > maxSlotEntries {
			list, crowded = list[:maxSlotEntries], true
		}
		for at, e := range list {
			if e.end.kind != endNat || e.problem != "" || e.end.nat == nil {
				continue
			}
			m, uncertain := remaining(id, list[:at], e)
			if m.dead() {
				continue
			}
			if uncertain == "" && crowded {
				uncertain = "too many rules come before it"
			}
			c.draft(drafts, id, e, &m, uncertain)
		}
	}
	return c.finish(id, drafts, output)
}

// remaining returns which packets for a slot reach an entry past those before it,
// and why that is uncertain, if it is.
func remaining(id slotID, earlier []*entry, e *entry) (m match, uncertain string) {
	m = e.m
	m.dport, m.proto = portOrder.one(id.slot.Port), protoBit(byte(id.slot.Protocol))
	for _, f := range earlier {
		switch {
		case f.rule == e.rule && f.act == e.act, !f.hides(e), !f.m.overlaps(&m, id.v6), f.m.marked:
		case len(f.m.opaque) > 0:
			uncertain = "may be decided by an earlier rule that is not understood: " + f.rule.text()
		default:
			if m = f.m.minus(&m, id.v6); m.dead() {
				return m, uncertain
			}
		}
	}
	return m, uncertain
}

// draft adds what packets m that meet an entry are for: an own address each, or the
// wildcard.
func (c *Compiler) draft(drafts map[bindingKey]*draft, id slotID, e *entry, m *match, uncertain string) {
	o := addrOrderOf(id.v6)
	keys := []netip.Addr{o.min}
	if !mostAddrs(m.daddr) {
		keys = c.localKeys(m.daddr, id.v6, maxKeys)
	}
	withheld := uncertain
	if withheld == "" {
		withheld = c.limits(e, m)
	}
	for _, k := range keys {
		bk := bindingKey{e.rule.chain.table.id, k}
		d := drafts[bk]
		if d == nil {
			d = &draft{first: e, withheld: withheld}
			drafts[bk] = d
		}
		if withheld == "" && !d.free {
			d.first, d.free, d.withheld = e, true, ""
		}
		d.outer = d.outer || withheld == "" && e.act.hook == ruleset.HookPrerouting
		for _, t := range e.end.nat.targets(k, id.slot.Port) {
			if !slices.Contains(d.targets, t) && len(d.targets) < maxDial {
				d.targets = append(d.targets, t)
			}
		}
	}
}

// limits returns what limits the clients of a match, "" if nothing does.
func (c *Compiler) limits(e *entry, m *match) string {
	if !mostAddrs(m.saddr) {
		return "limited to source " + addrsText(m.saddr)
	}
	if m.clients != "" {
		return "limited to sources in " + m.clients
	}
	if e.act.hook == ruleset.HookOutput {
		return ""
	}
	if m.src == srcLocal {
		return "limited to local sources"
	}
	if !m.iif.limited {
		return ""
	}
	for _, n := range c.host.Uplinks {
		if m.iif.contains(n) {
			return ""
		}
	}
	if m.iif.not {
		for _, n := range c.host.Uplinks {
			if !m.iif.contains(n) {
				return "excludes interface " + n + ", which carries the default route"
			}
		}
		return ""
	}
	return "limited to interface " + strings.Join(m.iif.names, ", ")
}

// finish makes bindings of drafts; output is what local connections meet.
func (c *Compiler) finish(id slotID, drafts map[bindingKey]*draft, output []*entry) []port.Binding {
	out := make([]port.Binding, 0, len(drafts))
	for k, d := range drafts {
		key := port.Key{Protocol: id.slot.Protocol, Address: k.addr, Port: id.slot.Port}
		b := port.Binding{
			Key:      key,
			Origin:   port.Origin{Source: port.SourceNAT, ID: k.table.String() + " " + key.String()},
			Withheld: d.withheld,
			Inner:    d.free && !d.outer,
			Maker:    d.first.rule.maker(),
			Hints:    port.Hints{Targets: d.targets},
			Detail:   port.LazyDetail(d.first.detail()),
		}
		b.Dial = c.dial(id, k, d.targets, output)
		out = append(out, b)
	}
	slices.SortFunc(out, func(a, b port.Binding) int { return cmp.Compare(a.Origin.ID, b.Origin.ID) })
	return out
}

// dial returns where the machine itself reaches a port: an own address that the
// rules are certain to redirect, and the targets.
func (c *Compiler) dial(id slotID, k bindingKey, targets []netip.AddrPort, output []*entry) []netip.AddrPort {
	for _, a := range c.dialAddrs(k.addr, id.v6) {
		if !c.answers(output, a, id.v6, k.table) {
			continue
		}
		own := netip.AddrPortFrom(a, id.slot.Port)
		if a.IsLoopback() && slices.ContainsFunc(targets, func(t netip.AddrPort) bool { return !t.Addr().IsLoopback() }) {
			// What leaves the machine with a loopback source needs route_localnet,
			// or is lost without an answer.
			targets = append(slices.Clone(targets), own)
		} else {
			targets = append([]netip.AddrPort{own}, targets...)
		}
		break
	}
	var out []netip.AddrPort
	for _, t := range targets {
		if !slices.Contains(out, t) && len(out) < maxDial {
			out = append(out, t)
		}
	}
	return out
}

// dialAddrs returns own addresses under which a publication can be tried. A node
// address comes first: a connection from 127.0.0.1 that is sent on to another
// machine needs route_localnet, and one from ::1 never gets there.
func (c *Compiler) dialAddrs(key netip.Addr, v6 bool) []netip.Addr {
	if !key.IsUnspecified() {
		return []netip.Addr{key}
	}
	var out []netip.Addr
	for _, a := range c.host.Nodes {
		if a.Is4() != v6 {
			out = append(out, a)
		}
	}
	return append(out, port.Loopback(key))
}

// answers reports whether a connection from this machine to its address a is
// certain to be redirected by a rule of table t.
func (c *Compiler) answers(output []*entry, a netip.Addr, v6 bool, t ruleset.TableID) bool {
	found := false
	var left []*activation // chains that the packet returned from
	for _, e := range output {
		if !e.m.local(a, v6) || e.m.marked {
			continue
		}
		if slices.ContainsFunc(left, func(a *activation) bool { return e.within(a) }) {
			continue
		}
		if len(e.m.opaque) > 0 {
			return false
		}
		switch e.end.kind {
		case endNat:
			if e.problem != "" || e.rule.chain.table.id != t {
				return false
			}
			found = found || e.m.clients == ""
			if !e.m.maybe {
				return true
			}
		case endReturn:
			if !e.m.maybe {
				left = append(left, e.act)
			}
		case endAccept:
			if !e.m.maybe {
				left = append(left, e.act.root)
			}
		case endDrop:
			return false
		}
	}
	return found
}

func (e *entry) within(a *activation) bool {
	for x := e.act; x != nil; x = x.parent {
		if x == a {
			return true
		}
	}
	return false
}

func addrsText(s set[netip.Addr]) string {
	var out []string
	for i, r := range s {
		if i == 4 {
			out = append(out, "…")
			break
		}
		out = append(out, ruleset.AddrRange{First: r.lo, Last: r.hi}.String())
	}
	return strings.Join(out, ", ")
}
