// SPDX-License-Identifier: Apache-2.0

package host

import (
	"net/netip"
	"slices"
	"testing"
	"unsafe"

	"github.com/fairlead/fairlead/internal/port"
)

// Each listener has a group and a slot, in the allocator's classes of 80 and 176 bytes on a
// machine of 64 bits. What only failures need is apart.
func TestListenerIsSmall(t *testing.T) {
	for name, c := range map[string]struct{ size, most uintptr }{
		"group": {unsafe.Sizeof(group{}), 80},
		"slot":  {unsafe.Sizeof(slot{}), 176},
	} {
		if c.size > c.most {
			t.Errorf("%s takes %d bytes, want at most %d", name, c.size, c.most)
		}
	}
}

// The claims of a group leave in any order, and its slots are found by their addresses.
func TestGroupOfManyAddresses(t *testing.T) {
	const n = 100
	g := new(group)
	var all []*claim
	for i := range n {
		c := new(claim)
		c.addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, byte(i * 37 % n)}), 80)
		all = append(all, c)
		g.enter(c)
		at, ok := g.find(c.addr.Addr())
		if ok {
			t.Fatalf("%s is there before it came", c.addr)
		}
		g.slots = slices.Insert(g.slots, at, new(locked).newSlot(port.TCP, c.addr))
	}
	for _, c := range all {
		if s := g.at(c.addr.Addr()); s == nil || s.addr != c.addr {
			t.Errorf("slot of %s: %v", c.addr, s)
		}
	}
	if s := g.wildcard(); s != nil {
		t.Errorf("wildcard: %v, want none", s.addr)
	}
	for i, c := range all {
		if i%3 == 0 {
			g.drop(c)
		}
	}
	for i, c := range all {
		if has := slices.Contains(g.claims, c); has != (i%3 != 0) {
			t.Errorf("claim %d is there: %v", i, has)
		}
	}
	for i, c := range g.claims {
		if c.place != i {
			t.Errorf("place %d of claim %d", c.place, i)
		}
	}
}
