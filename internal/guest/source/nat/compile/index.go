// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"slices"

	"github.com/fairlead/fairlead/internal/guest/source/nat/region"
	"github.com/fairlead/fairlead/internal/guest/source/nat/ruleset"
	"github.com/fairlead/fairlead/internal/port"
)

type slotID struct {
	v6   bool
	slot port.Slot
}

type wideID struct {
	v6   bool
	hook uint8
}

// useID is what rules of the output hook do to connections that this machine makes:
// to a port, on its own addresses or on others; or, with an address and no port,
// what rules do that name this one address elsewhere.
type useID struct {
	slotID
	own  bool
	addr netip.Addr
}

// useOf returns the use of rules that name a single address elsewhere.
func useOf(addr netip.Addr) useID { return useID{slotID: slotID{v6: addr.Is6()}, addr: addr} }

// index finds the entries that packets for a port meet: narrow ones by port, and
// wide ones, which are for many ports.
type index struct {
	slots map[slotID][]*entry
	wide  map[wideID][]*entry
	// remote has the entries of the output hook for a single address elsewhere. It is
	// usually a Service's own, of which there are thousands, and no port is published
	// for them. A dial of a target at that address meets them.
	remote map[netip.Addr][]*entry
	bad    map[*entry]struct{} // those with a problem

	dirtySlots map[slotID]struct{} // whose bindings may have changed
	dirtyWide  map[wideID]struct{}
	badChanged bool

	uses       map[slotID][]useID            // what the dial targets of a slot depend on
	dependents map[useID]map[slotID]struct{} // the inverse of uses
}

func newIndex() index {
	return index{
		slots:      make(map[slotID][]*entry),
		wide:       make(map[wideID][]*entry),
		remote:     make(map[netip.Addr][]*entry),
		bad:        make(map[*entry]struct{}),
		dirtySlots: make(map[slotID]struct{}),
		dirtyWide:  make(map[wideID]struct{}),
		uses:       make(map[slotID][]useID),
		dependents: make(map[useID]map[slotID]struct{}),
	}
}

// add adds an entry, as a wide one if it is for more than limit ports.
func (x *index) add(e *entry, limit int) {
	e.wide = region.CountPorts(e.m.Dport) > limit
	if e.wide {
		id := wideID{e.act.v6, e.act.hook}
		x.wide[id] = append(x.wide[id], e)
		x.dirtyWide[id] = struct{}{}
	} else {
		e.eachSlot(func(id slotID) {
			x.slots[id] = append(x.slots[id], e)
			x.touch(id, e)
		})
	}
	if e.problem != "" {
		x.bad[e] = struct{}{}
		x.badChanged = true
	}
}

// addRemote adds an entry that is for a single address elsewhere.
func (x *index) addRemote(e *entry, addr netip.Addr) {
	e.remote = addr
	x.remote[addr] = append(x.remote[addr], e)
	x.touchDependents(useOf(addr))
}

func (x *index) drop(e *entry) {
	switch {
	case e.remote.IsValid():
		if rest := without(x.remote[e.remote], e); len(rest) > 0 {
			x.remote[e.remote] = rest
		} else {
			delete(x.remote, e.remote)
		}
		x.touchDependents(useOf(e.remote))
		return
	case e.wide:
		id := wideID{e.act.v6, e.act.hook}
		x.wide[id] = without(x.wide[id], e)
		x.dirtyWide[id] = struct{}{}
	default:
		e.eachSlot(func(id slotID) {
			if s := without(x.slots[id], e); len(s) > 0 {
				x.slots[id] = s
			} else {
				delete(x.slots, id)
			}
			x.touch(id, e)
		})
	}
	if _, ok := x.bad[e]; ok {
		delete(x.bad, e)
		x.badChanged = true
	}
}

// touch marks as dirty what e bears on in a slot.
func (x *index) touch(id slotID, e *entry) {
	x.dirtySlots[id] = struct{}{}
	if e.act.hook != ruleset.HookOutput {
		return
	}
	for _, own := range []bool{false, true} {
		to := region.Remote
		if own {
			to = region.Local
		}
		if e.m.To&to == 0 {
			continue
		}
		x.touchDependents(useID{slotID: id, own: own})
	}
}

func (x *index) touchDependents(u useID) {
	for d := range x.dependents[u] {
		x.dirtySlots[d] = struct{}{}
	}
}

// depend notes that the bindings of id depend on uses, and on nothing else but its
// own entries.
func (x *index) depend(id slotID, uses map[useID]struct{}) {
	was := x.uses[id]
	if len(was) == len(uses) && !slices.ContainsFunc(was, func(u useID) bool { _, ok := uses[u]; return !ok }) {
		return
	}
	for _, u := range was {
		if delete(x.dependents[u], id); len(x.dependents[u]) == 0 {
			delete(x.dependents, u)
		}
	}
	delete(x.uses, id)
	for u := range uses {
		if x.dependents[u] == nil {
			x.dependents[u] = make(map[slotID]struct{})
		}
		x.dependents[u][id] = struct{}{}
		x.uses[id] = append(x.uses[id], u)
	}
}

// spread marks the slots as dirty that dirty wide entries are for.
func (x *index) spread() {
	for id := range x.dirtyWide {
		for s := range x.slots {
			if s.v6 == id.v6 {
				x.dirtySlots[s] = struct{}{}
			}
		}
	}
	clear(x.dirtyWide)
}

// eachSlot calls f with each port and protocol that an entry is for.
func (e *entry) eachSlot(f func(slotID)) {
	for _, r := range region.Ports().Spans(e.m.Dport) {
		for p := max(int(r.Lo), 1); p <= int(r.Hi); p++ {
			if e.m.Protocols&region.TCP != 0 {
				f(slotID{e.act.v6, port.Slot{Protocol: port.TCP, Port: uint16(p)}})
			}
			if e.m.Protocols&region.UDP != 0 {
				f(slotID{e.act.v6, port.Slot{Protocol: port.UDP, Port: uint16(p)}})
			}
		}
	}
}

func without(s []*entry, e *entry) []*entry {
	if i := slices.Index(s, e); i >= 0 {
		s[i] = s[len(s)-1]
		s[len(s)-1] = nil
		return s[:len(s)-1]
	}
	return s
}
