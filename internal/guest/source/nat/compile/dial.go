// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
)

// maxTried bounds the own addresses under which one publication is tried.
const maxTried = 16

// outcome is where the output hook sends connections that this machine makes.
type outcome struct {
	targets []netip.AddrPort
	doubt   string // why that is not certain
	marks   string // why it may be otherwise for connections with a packet mark, "" if it is not
}

// within reports whether the output hook certainly sends connections to some of
// targets, and nowhere else.
func (o outcome) within(targets []netip.AddrPort) bool {
	return o.doubt == "" && len(o.targets) > 0 &&
		!slices.ContainsFunc(o.targets, func(t netip.AddrPort) bool { return !slices.Contains(targets, t) })
}

// dial returns where this machine reaches the servers that clients of the slot at
// key reach, best first, and why that is not certain if it is not.
//
// A connection to an own address comes first, where the output hook certainly
// sends it to the same servers; else the servers themselves, where the output hook
// leaves connections to them alone. The first lead targets are of the first rule. It is
// not certain that clients reach the others, which are of rules after it.
func (c *Compiler) dial(id slotID, key netip.Addr, targets []netip.AddrPort, lead int) (dial []netip.AddrPort, doubt string) {
	same := func(o outcome) bool { return o.within(targets) }
	certain := false // a server of the first rule can be reached
	marks := ""      // why that is so only without a packet mark
	add := func(t netip.AddrPort) {
		if !slices.Contains(dial, t) && len(dial) < maxDial {
			dial = append(dial, t)
		}
	}
	for i, t := range targets {
		at := slotID{id.v6, port.Slot{Protocol: id.slot.Protocol, Port: t.Port()}}
		list, crowded := c.leavingEntries(at, t.Addr())
		if o := c.output(at, t.Addr(), list, crowded); same(o) {
			add(t)
			certain, marks = certain || i < lead, cmp.Or(marks, o.marks)
		} else if doubt == "" {
			doubt = o.doubt
			if doubt == "" {
				doubt = fmt.Sprintf("a rule of the output hook catches connections of this machine to %s", t)
			}
		}
	}
	var lost netip.AddrPort // a loopback address, last and not for certain
	list, crowded := c.hookEntries(id, ruleset.HookOutput)
	for _, a := range c.ownAddrs(key, id.v6) {
		o := c.output(id, a, list, crowded)
		if !same(o) {
			continue
		}
		own := netip.AddrPortFrom(a, id.slot.Port)
		if a.IsLoopback() && slices.ContainsFunc(targets, func(t netip.AddrPort) bool { return !t.Addr().IsLoopback() }) {
			// What leaves the machine with a loopback source needs route_localnet,
			// or is lost without an answer.
			lost = own
		} else {
			dial = slices.Insert(dial, 0, own)
			certain, marks = certain || o.within(targets[:lead]), cmp.Or(marks, o.marks)
		}
		break
	}
	switch {
	case certain:
		doubt = marks
	case doubt == "" && len(dial) > 0:
		doubt = "connections of this machine reach only servers of a later rule"
	}
	if len(dial) == 0 {
		for _, t := range targets {
			add(t)
		}
	}
	if lost.IsValid() {
		add(lost)
	}
	return dial, doubt
}

// ownAddrs returns own addresses under which a publication can be tried. A node
// address comes first: a connection from 127.0.0.1 that is sent on to another
// machine needs route_localnet, and one from ::1 never gets there.
func (c *Compiler) ownAddrs(key netip.Addr, v6 bool) []netip.Addr {
	if !key.IsUnspecified() {
		return []netip.Addr{key}
	}
	nodes := c.nodes(v6)
	return append(slices.Clone(nodes[:min(len(nodes), maxTried)]), port.Loopback(key))
}

// leavingEntries returns the entries that a connection from this machine to addr
// and the port of the slot meets.
func (c *Compiler) leavingEntries(id slotID, addr netip.Addr) (list []*entry, crowded bool) {
	list, crowded = c.hookEntries(id, ruleset.HookOutput)
	remote := c.index.remote[addr]
	if len(remote) == 0 || crowded {
		return list, crowded
	}
	bit := protocolBit(byte(id.slot.Protocol))
	for _, e := range remote {
		if e.m.Protocols&bit != 0 && region.Ports().Contains(e.m.Dport, id.slot.Port) {
			list = append(list, e)
		}
	}
	slices.SortFunc(list, (*entry).before)
	return list, len(list) > maxSlotEntries
}

// output returns where a connection from this machine to addr and the port of the
// slot is sent by the entries of list.
func (c *Compiler) output(id slotID, addr netip.Addr, list []*entry, crowded bool) (o outcome) {
	if crowded {
		return outcome{doubt: "too many rules of the output hook come before it"}
	}
	self := netip.AddrPortFrom(addr, id.slot.Port)
	if len(list) == 0 {
		return outcome{targets: []netip.AddrPort{self}}
	}
	packet := c.leaving(id, addr)
	space := region.Space{V6: id.v6}
	add := func(targets ...netip.AddrPort) {
		for _, t := range targets {
			if !slices.Contains(o.targets, t) {
				o.targets = append(o.targets, t)
			}
		}
	}
	perhaps := func(e *entry) outcome {
		return outcome{doubt: fmt.Sprintf("a rule of the output hook may catch connections of this machine to %s: %s", self, e.rule.text())}
	}
	var returned, accepted []*activation // chains that the packet has left
	var done []*activation               // chains that balance among servers and leave no packet
	var some *entry                      // by which some packets have left a chain
	for _, e := range list {
		if !space.Overlap(&e.m.Box, &packet) {
			continue
		}
		if e.m.marks && o.marks == "" {
			o.marks = "a rule of the output hook " + tableMarks + ": " + e.rule.text()
		}
		if e.m.marked {
			continue
		}
		if !e.isPolicy() && slices.ContainsFunc(returned, e.within) || slices.ContainsFunc(accepted, e.within) {
			continue
		}
		if len(e.m.opaque) > 0 || e.m.others && e.end.kind == endNat || e.problem != "" || !space.Covers(&e.m.Box, &packet) {
			return perhaps(e)
		}
		switch e.end.kind {
		case endNat:
			if some != nil {
				return perhaps(some)
			}
			if r := e.rival(list, func(f *entry) bool { return space.Overlap(&f.m.Box, &packet) }); r != nil {
				return perhaps(r)
			}
			add(e.end.nat.targets(addr, id.slot.Port, []netip.Addr{port.Loopback(addr)})...)
			if !e.m.maybe {
				return o
			}
			if !e.balances() {
				done = append(done, e.act)
			}
		case endReturn, endAccept:
			switch {
			case e.m.maybe && slices.Contains(done, e.act.kids[e.rule][e.key]): // the end of a goto
			case e.m.maybe, e.m.others:
				some = e
			case e.end.kind == endReturn:
				returned = append(returned, e.act)
			default:
				accepted = append(accepted, e.act.root)
			}
		case endDrop:
			return outcome{doubt: fmt.Sprintf("a rule of the output hook drops connections of this machine to %s", self)}
		}
	}
	if len(o.targets) == 0 { // a balancer is taken to cover all
		add(self)
	}
	return o
}

// leaving returns the first packet of a connection from this machine to addr and
// the port of the slot. Its source is what the route prefers, which may be any own
// address; see sourcesTo for those of a connection to an own one.
func (c *Compiler) leaving(id slotID, addr netip.Addr) region.Box {
	addrs := region.Addrs(id.v6)
	b := region.Box{
		Protocols: protocolBit(byte(id.slot.Protocol)), From: region.Local, To: region.Remote,
		Dport: region.Ports().One(id.slot.Port), Daddr: addrs.One(addr), In: region.Named(""),
	}
	sources := c.host.sources[familyIndex(id.v6)]
	switch {
	case addr.IsLoopback():
		b.To, b.Saddr, b.Out = region.Local, addrs.One(port.Loopback(addr)), c.host.loopbacks
	case slices.Contains(c.reachable(id.v6), addr):
		b.To, b.Saddr, b.Out = region.Local, addrs.None(), c.host.loopbacks
		for _, a := range c.sourcesTo(addr) {
			b.Saddr = addrs.Union(b.Saddr, addrs.One(a))
		}
	case c.own(addr):
		b.To, b.Saddr, b.Out = region.Local, sources, c.host.loopbacks
	default:
		b.Out, b.Saddr = c.host.loopbacks.Complement(), sources
	}
	return b
}

// own reports whether addr is an address of this machine.
func (c *Compiler) own(addr netip.Addr) bool {
	v6 := addr.Is6()
	return addr.IsLoopback() || region.Addrs(v6).Contains(c.host.local[familyIndex(v6)], addr)
}

// balances reports whether e's rule takes only some of the packets that come to it.
func (e *entry) balances() bool {
	ev := e.rule.eval[familyIndex(e.act.v6)]
	if ev == nil {
		return true
	}
	b := ev.branches.get(e.key)
	return b == nil || b.m.maybe
}

func (e *entry) within(a *activation) bool {
	for x := e.act; x != nil; x = x.parent {
		if x == a {
			return true
		}
	}
	return false
}
