// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/port"
)

// AttributionKey is one thing that an owner is known by. One of its fields is set.
type AttributionKey struct {
	Cgroup  uint64     // id of a cgroup2 directory
	Path    string     // of a cgroup, or the id of a container that is in one
	Address netip.Addr // where a NAT rule sends to, unmapped
}

// attribution is the owner of all bindings with the same hints. It is looked up
// when the first such binding appears and when the facts about one of its keys
// change, never for a binding that comes or goes.
type attribution struct {
	id    hintsID
	hints *port.Hints
	answer
	slots bag[port.Slot] // of the bindings, to merge again

	container bool      // a path may be that of a container
	kept      bool      // the owner has labels that no engine reports any more
	since     time.Time // when it was last without bindings, or its owner became unknown
	left      string    // the container that was at a NAT rule's targets and has stopped
}

// hintsID tells hints apart.
type hintsID struct {
	cgroup uint64
	text   string // paths, or addresses
}

// maxIdle is how many attributions without bindings are kept, because servers
// restart.
const maxIdle = 256

// attributions is the index from attribution keys to bindings. The registry's
// lock guards it.
type attributions struct {
	arbiter arbiter
	byHints map[hintsID]*attribution
	byKey   map[AttributionKey]*bag[*attribution]
	idle    int
}

func newAttributions() attributions {
	return attributions{byHints: make(map[hintsID]*attribution), byKey: make(map[AttributionKey]*bag[*attribution])}
}

// enter counts a binding in and returns its attribution, nil if it has no hints
// or no engine has facts. live says that all engines are.
func (as *attributions) enter(b *kept, now func() time.Time, live bool) *attribution {
	id := idOf(*b.Hints)
	if len(as.arbiter.engines) == 0 || id == (hintsID{}) {
		return nil
	}
	a := as.byHints[id]
	if a == nil {
		a = &attribution{id: id, hints: b.Hints}
		as.byHints[id] = a
		as.lookUp(a, time.Time{}, live)
		for k := range keysOf(*a.hints) {
			if as.byKey[k] == nil {
				as.byKey[k] = new(bag[*attribution])
			}
			as.byKey[k].add(a)
			a.container = a.container || cgroup.IsContainerID(k.Path) || cgroup.MayBeContainer(k.Path)
		}
	} else if a.slots.empty() {
		as.idle--
		if a.kept { // these were another container's labels
			a.answer, a.kept = answer{}, false
			as.lookUp(a, time.Time{}, live)
		}
	}
	if a.slots.empty() {
		a.since, a.left = now(), ""
		if a.unnamed && live {
			a.left = as.arbiter.stopped(a.hints.Targets)
		}
	}
	a.slots.add(b.Slot())
	return a
}

// leave counts a binding out.
func (as *attributions) leave(a *attribution, s port.Slot) {
	if a == nil {
		return
	}
	if a.slots.drop(s); !a.slots.empty() {
		return
	}
	if as.idle++; as.idle <= maxIdle {
		return
	}
	for _, a := range as.byHints {
		if a.slots.empty() {
			as.forget(a)
		}
	}
	as.idle = 0
}

func (as *attributions) forget(a *attribution) {
	delete(as.byHints, a.id)
	for k := range keysOf(*a.hints) {
		if b := as.byKey[k]; b != nil {
			if b.drop(a); b.empty() {
				delete(as.byKey, k)
			}
		}
	}
}

// lookUp asks for the owner and reports whether it changed. live reports that all
// engines are, so that an owner who is gone has stopped.
func (as *attributions) lookUp(a *attribution, now time.Time, live bool) bool {
	next, left := as.arbiter.owner(*a.hints), a.left
	if a.known && next.known && len(next.owner.Labels) == 0 && len(a.owner.Labels) > 0 && sameContainer(a.owner, next.owner) {
		// The engine that knows its labels has forgotten it before the others.
		next.owner, a.kept = a.owner, true
	}
	switch {
	case !next.unnamed: // all are named, if by engines that contradict each other
		left = ""
	case a.known && live:
		left = a.owner.Name
	case live && left == "":
		left = as.arbiter.stopped(a.hints.Targets)
	}
	if next.equal(&a.answer) && left == a.left {
		return false
	}
	if a.known && !next.known {
		a.since = now
	}
	a.answer, a.left = next, left
	return true
}

func (ans *answer) equal(b *answer) bool {
	return ans.known == b.known && ans.stale == b.stale && ans.unnamed == b.unnamed && ans.owner.Equal(b.owner) &&
		slices.EqualFunc(ans.rivals, b.rivals, port.Owner.Equal) && slices.EqualFunc(ans.targets, b.targets, port.Owner.Equal)
}

// factsChanged looks up again what the keys lead to, and calls dirty with each
// slot that has another owner now.
func (as *attributions) factsChanged(changed []AttributionKey, now time.Time, live bool, dirty func(port.Slot)) {
	for _, k := range changed {
		if b := as.byKey[k]; b != nil {
			b.each(func(a *attribution) {
				if as.lookUp(a, now, live) {
					a.slots.each(dirty)
				}
			})
		}
	}
}

// all looks up everything again, after an engine became live or stale, and calls
// dirty with each slot that has another owner now.
func (as *attributions) all(now time.Time, live bool, dirty func(port.Slot)) {
	for _, a := range as.byHints {
		if as.lookUp(a, now, live) {
			a.slots.each(dirty)
		}
	}
}

// idOf identifies hints. It allocates only where there are several paths, or
// targets.
func idOf(h port.Hints) hintsID {
	id := hintsID{cgroup: h.Cgroup}
	switch {
	case len(h.Targets) > 0:
		b := make([]byte, 0, 16*len(h.Targets))
		for _, t := range h.Targets {
			a := t.Addr().As16()
			b = append(b, a[:]...)
		}
		id.text = string(b)
	case len(h.Paths) == 1:
		id.text = h.Paths[0]
	case len(h.Paths) > 1:
		id.text = strings.Join(h.Paths, "\n")
	}
	return id
}

// keysOf returns the attribution keys of hints.
func keysOf(h port.Hints) map[AttributionKey]struct{} {
	out := make(map[AttributionKey]struct{})
	if h.Cgroup != 0 {
		out[AttributionKey{Cgroup: h.Cgroup}] = struct{}{}
	}
	for _, path := range h.Paths {
		for p := range cgroup.Ancestors(path) {
			out[AttributionKey{Path: p}] = struct{}{}
			if id := cgroup.ContainerID(p); id != "" {
				out[AttributionKey{Path: id}] = struct{}{}
			}
		}
	}
	for _, t := range h.Targets {
		out[AttributionKey{Address: t.Addr().Unmap()}] = struct{}{}
	}
	return out
}

// bag is a multiset. The first value takes no memory of its own.
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
