// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"net/netip"
	"strings"

	"github.com/fairlead/fairlead/internal/cgroup"
	"github.com/fairlead/fairlead/internal/port"
)

// Attributor knows who owns what. Its answers may change at any time; whoever
// knows that they did tells Registry.Reattribute.
type Attributor interface {
	// Owner names the owner by hints; false means that it is not known. It is
	// called under the registry's lock: it does not wait, and does not call back.
	Owner(h port.Hints) (port.Owner, bool)
}

// Clue is one thing that an owner is known by. One of its fields is set.
type Clue struct {
	Cgroup  uint64     // id of a cgroup2 directory
	Path    string     // of a cgroup, or the id of a container that is in one
	Address netip.Addr // where a NAT rule sends to, unmapped
}

// place is where a socket is, or a NAT rule leads: all bindings with the same
// hints have the same owner. It is attributed when it is new and when a clue to
// it changed, never for a binding that comes or goes.
type place struct {
	key   placeKey
	hints port.Hints
	owner port.Owner
	known bool
	slots bag[port.Slot] // of the bindings, to merge again
}

type placeKey struct {
	cgroup uint64
	text   string // paths, or addresses
}

// maxIdle is how many places are kept that no binding is at: servers come back.
const maxIdle = 256

// places is the index from clues to bindings. The registry's lock guards it.
type places struct {
	by    Attributor
	byKey map[placeKey]*place
	clues map[Clue]*bag[*place]
	idle  int
}

func newPlaces(by Attributor) places {
	return places{by: by, byKey: make(map[placeKey]*place), clues: make(map[Clue]*bag[*place])}
}

// enter counts a binding in and returns its place, nil if it hints at nothing.
func (ps *places) enter(b *port.Binding) *place {
	key := keyOf(b.Hints)
	if ps.by == nil || key == (placeKey{}) {
		return nil
	}
	p := ps.byKey[key]
	if p == nil {
		p = &place{key: key, hints: b.Hints}
		ps.byKey[key] = p
		ps.attribute(p)
		for c := range cluesOf(p.hints) {
			if ps.clues[c] == nil {
				ps.clues[c] = new(bag[*place])
			}
			ps.clues[c].add(p)
		}
	} else if p.slots.empty() {
		ps.idle--
	}
	p.slots.add(b.Slot())
	return p
}

// leave counts a binding out.
func (ps *places) leave(p *place, s port.Slot) {
	if p == nil {
		return
	}
	if p.slots.drop(s); !p.slots.empty() {
		return
	}
	if ps.idle++; ps.idle <= maxIdle {
		return
	}
	for _, p := range ps.byKey {
		if p.slots.empty() {
			ps.forget(p)
		}
	}
	ps.idle = 0
}

func (ps *places) forget(p *place) {
	delete(ps.byKey, p.key)
	for c := range cluesOf(p.hints) {
		if b := ps.clues[c]; b != nil {
			if b.drop(p); b.empty() {
				delete(ps.clues, c)
			}
		}
	}
}

// attribute asks who owns a place and reports whether that changed.
func (ps *places) attribute(p *place) bool {
	owner, known := ps.by.Owner(p.hints)
	if known == p.known && owner.Equal(p.owner) {
		return false
	}
	p.owner, p.known = owner, known
	return true
}

// reattribute asks anew for the places that clues lead to, and calls dirty with
// each slot that has another owner now.
func (ps *places) reattribute(changed []Clue, dirty func(port.Slot)) {
	if ps.by == nil {
		return
	}
	for _, c := range changed {
		if b := ps.clues[c]; b != nil {
			b.each(func(p *place) {
				if ps.attribute(p) {
					p.slots.each(dirty)
				}
			})
		}
	}
}

// keyOf tells hints apart. It allocates only where there are several paths, or
// targets.
func keyOf(h port.Hints) placeKey {
	k := placeKey{cgroup: h.Cgroup}
	switch {
	case len(h.Targets) > 0:
		b := make([]byte, 0, 16*len(h.Targets))
		for _, t := range h.Targets {
			a := t.Addr().As16()
			b = append(b, a[:]...)
		}
		k.text = string(b)
	case len(h.Paths) == 1:
		k.text = h.Paths[0]
	case len(h.Paths) > 1:
		k.text = strings.Join(h.Paths, "\n")
	}
	return k
}

// cluesOf yields the clues that lead to hints, each once.
func cluesOf(h port.Hints) map[Clue]struct{} {
	out := make(map[Clue]struct{})
	if h.Cgroup != 0 {
		out[Clue{Cgroup: h.Cgroup}] = struct{}{}
	}
	for _, path := range h.Paths {
		for p := range cgroup.Ancestors(path) {
			out[Clue{Path: p}] = struct{}{}
			if id := cgroup.ContainerID(p); id != "" {
				out[Clue{Path: id}] = struct{}{}
			}
		}
	}
	for _, t := range h.Targets {
		out[Clue{Address: t.Addr().Unmap()}] = struct{}{}
	}
	return out
}

// bag counts values. The first takes no memory of its own.
type bag[T comparable] struct {
	one  T
	n    int // of one
	more map[T]int
}

func (b *bag[T]) add(v T) {
	switch {
	case b.n > 0 && b.one == v:
		b.n++
	case b.n == 0 && b.more[v] == 0:
		b.one, b.n = v, 1
	default:
		if b.more == nil {
			b.more = make(map[T]int)
		}
		b.more[v]++
	}
}

func (b *bag[T]) drop(v T) {
	switch {
	case b.n > 0 && b.one == v:
		if b.n--; b.n == 0 {
			b.one = *new(T)
		}
	case b.more[v] > 1:
		b.more[v]--
	default:
		delete(b.more, v)
	}
}

func (b *bag[T]) empty() bool { return b.n == 0 && len(b.more) == 0 }

func (b *bag[T]) each(f func(T)) {
	if b.n > 0 {
		f(b.one)
	}
	for v := range b.more {
		f(v)
	}
}
