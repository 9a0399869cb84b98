// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"slices"

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

// index finds the entries that packets for a port meet: narrow ones by port, and
// wide ones, which are for many ports.
type index struct {
	slots map[slotID][]*entry
	wide  map[wideID][]*entry
	bad   map[*entry]struct{} // those with a problem

	dirtySlots map[slotID]struct{} // whose bindings may have changed
	dirtyWide  map[wideID]struct{}
	badChanged bool
}

func newIndex() index {
	return index{
		slots:      make(map[slotID][]*entry),
		wide:       make(map[wideID][]*entry),
		bad:        make(map[*entry]struct{}),
		dirtySlots: make(map[slotID]struct{}),
		dirtyWide:  make(map[wideID]struct{}),
	}
}

// add adds an entry, as a wide one if it is for more than limit ports.
func (x *index) add(e *entry, limit int) {
	e.wide = portCount(e.m.dport) > limit
	if e.wide {
		id := wideID{e.act.v6, e.act.hook}
		x.wide[id] = append(x.wide[id], e)
		x.dirtyWide[id] = struct{}{}
	} else {
		e.eachSlot(func(id slotID) {
			x.slots[id] = append(x.slots[id], e)
			x.dirtySlots[id] = struct{}{}
		})
	}
	if e.problem != "" {
		x.bad[e] = struct{}{}
		x.badChanged = true
	}
}

func (x *index) drop(e *entry) {
	if e.wide {
		id := wideID{e.act.v6, e.act.hook}
		x.wide[id] = without(x.wide[id], e)
		x.dirtyWide[id] = struct{}{}
	} else {
		e.eachSlot(func(id slotID) {
			if s := without(x.slots[id], e); len(s) > 0 {
				x.slots[id] = s
			} else {
				delete(x.slots, id)
			}
			x.dirtySlots[id] = struct{}{}
		})
	}
	if _, ok := x.bad[e]; ok {
		delete(x.bad, e)
		x.badChanged = true
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
	for _, r := range e.m.dport {
		for p := max(int(r.lo), 1); p <= int(r.hi); p++ {
			if e.m.proto&bitTCP != 0 {
				f(slotID{e.act.v6, port.Slot{Protocol: port.TCP, Port: uint16(p)}})
			}
			if e.m.proto&bitUDP != 0 {
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
