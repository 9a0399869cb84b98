// SPDX-License-Identifier: Apache-2.0

package users

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
)

// What one engine of a user may name.
const (
	maxContainers = 256
	maxPorts      = 256 // of one container
	maxAllPorts   = 4096
	maxName       = 255 // bytes, and so long are other texts
)

// bounded is an engine of a user, of which no more is kept than names of ports.
type bounded struct{ engine.Engine }

// List implements engine.Engine.
func (b bounded) List(ctx context.Context) ([]engine.Object, error) {
	all, err := b.Engine.List(ctx)
	if err != nil {
		return nil, err
	}
	if len(all) > maxContainers {
		return nil, fmt.Errorf("%d containers run: at most %d of a user are named", len(all), maxContainers)
	}
	for i := range all {
		all[i] = bound(all[i])
	}
	return all, nil
}

// Look implements engine.Engine.
func (b bounded) Look(ctx context.Context, id string) (engine.Object, bool, error) {
	o, found, err := b.Engine.Look(ctx, id)
	return bound(o), found, err
}

// bound takes labels, addresses and cgroups from a container: they could be anybody's. What is
// not of a container, as a service of a swarm, is left out.
func bound(o engine.Object) engine.Object {
	o.Bindings = slices.DeleteFunc(o.Bindings, func(b port.Binding) bool { return b.Owner.Kind != port.OwnerContainer })
	if n := len(o.Bindings); n > maxPorts {
		o.Bindings = o.Bindings[:maxPorts:maxPorts]
		o.Warnings = append(o.Warnings, fmt.Sprintf("a container publishes %d ports: at most %d are named", n, maxPorts))
	}
	for i := range o.Bindings {
		b := &o.Bindings[i]
		*b = port.Binding{Key: b.Key, Origin: b.Origin, Owner: port.Owner{Kind: b.Owner.Kind, Name: cut(b.Owner.Name), ID: cut(b.Owner.ID)}}
	}
	o.Fact = engine.Fact{}
	return o
}

func cut(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxName)], "") }

// claim is that a container of a user publishes a port.
type claim struct {
	key   port.Key
	owner port.Owner
}

// table has what the engines of all users say. The zero value is ready. It is safe for
// concurrent use.
type table struct {
	mu     sync.RWMutex
	byUser map[uint32]map[port.Slot][]claim
	notify func([]port.Slot)
}

var _ registry.Holders = (*table)(nil)

// Notify implements registry.Holders.
func (t *table) Notify(f func([]port.Slot)) { t.notify = f }

// Holder implements registry.Holders. A wildcard of one family may be published by a socket
// of the other.
func (t *table) Holder(user uint32, k port.Key) (port.Owner, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, c := range t.byUser[user][k.Slot()] {
		if c.key.Address == k.Address || port.IsWildcard(c.key.Address) && port.IsWildcard(k.Address) {
			return c.owner, true
		}
	}
	return port.Owner{}, false
}

// change replaces claims of a user.
func (t *table) change(user uint32, drop, put []claim) {
	slots := make(map[port.Slot]struct{})
	t.mu.Lock()
	if t.byUser == nil {
		t.byUser = make(map[uint32]map[port.Slot][]claim)
	}
	of := t.byUser[user]
	if of == nil {
		of = make(map[port.Slot][]claim)
		t.byUser[user] = of
	}
	for _, c := range drop {
		s := c.key.Slot()
		slots[s] = struct{}{}
		i := slices.IndexFunc(of[s], func(d claim) bool { return d.key == c.key && d.owner.Equal(c.owner) })
		if i < 0 {
			continue
		}
		if of[s] = slices.Delete(of[s], i, i+1); len(of[s]) == 0 {
			delete(of, s)
		}
	}
	for _, c := range put {
		s := c.key.Slot()
		slots[s] = struct{}{}
		of[s] = append(of[s], c)
		// Which of several is taken must not depend on who came first.
		slices.SortFunc(of[s], func(a, b claim) int {
			return cmp.Or(a.key.Address.Compare(b.key.Address), cmp.Compare(a.owner.ID, b.owner.ID))
		})
	}
	if len(of) == 0 {
		delete(t.byUser, user)
	}
	t.mu.Unlock()
	if t.notify != nil && len(slots) > 0 {
		t.notify(slices.Collect(maps.Keys(slots)))
	}
}

// view is the feed of one engine of a user.
type view struct {
	table *table
	user  uint32
	held  port.Held // but for the process
	said  func()    // called after the state has changed

	mu     sync.Mutex
	claims map[string]claim // by origin
	state
}

// state is what is shown of an engine.
type state struct {
	method   string
	warnings []string
	stale    string // why it is, "" if it is not
}

var _ registry.Feed = (*view)(nil)

// Replace implements registry.Feed.
func (v *view) Replace(set []port.Binding) {
	v.mu.Lock()
	next := make(map[string]claim, len(set))
	for _, b := range set {
		if len(next) < maxAllPorts {
			next[b.Origin.ID] = v.claim(b)
		}
	}
	var drop, put []claim
	for id, c := range v.claims {
		if n, ok := next[id]; !ok || !n.equal(c) {
			drop = append(drop, c)
		}
	}
	for id, c := range next {
		if o, ok := v.claims[id]; !ok || !o.equal(c) {
			put = append(put, c)
		}
	}
	v.claims, v.stale = next, ""
	v.table.change(v.user, drop, put)
	v.mu.Unlock()
	v.said()
}

// Apply implements registry.Feed.
func (v *view) Apply(c port.Change) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.claims == nil {
		v.claims = make(map[string]claim)
	}
	var drop, put []claim
	for _, o := range c.Drop {
		if old, ok := v.claims[o.ID]; ok {
			delete(v.claims, o.ID)
			drop = append(drop, old)
		}
	}
	for _, b := range c.Put {
		old, had := v.claims[b.Origin.ID]
		if had {
			drop = append(drop, old)
		} else if len(v.claims) >= maxAllPorts {
			continue
		}
		n := v.claim(b)
		v.claims[b.Origin.ID] = n
		put = append(put, n)
	}
	v.table.change(v.user, drop, put)
}

func (v *view) claim(b port.Binding) claim {
	o := b.Owner
	o.Held = &v.held
	return claim{b.Key, o}
}

func (c claim) equal(d claim) bool { return c.key == d.key && c.owner.Equal(d.owner) }

// Stale implements registry.Feed.
func (v *view) Stale(err error) { v.set(func() { v.stale = cut(err.Error()) }) }

// Warn implements registry.Feed.
func (v *view) Warn(texts []string) { v.set(func() { v.warnings = texts }) }

// Method implements registry.Feed.
func (v *view) Method(name string) { v.set(func() { v.method = cut(name) }) }

// Lacks implements registry.Feed.
func (v *view) Lacks(_ port.Lack, why string) { v.Method(why) }

func (v *view) set(f func()) {
	v.mu.Lock()
	f()
	v.mu.Unlock()
	v.said()
}

// end takes everything back.
func (v *view) end() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.table.change(v.user, slices.Collect(maps.Values(v.claims)), nil)
	v.claims = nil
}

// shown returns the state to show. present is whether there is an engine.
func (v *view) shown() (s state, present bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state, v.stale != "" || strings.HasPrefix(v.method, v.held.Engine+" ")
}
