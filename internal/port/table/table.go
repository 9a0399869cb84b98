// SPDX-License-Identifier: Apache-2.0

// Package table is a sorted map with cheap immutable views, a generation for
// each change, and subscribers that are notified of changes and read the latest
// state.
package table

import (
	"iter"
	"sync"

	"github.com/tidwall/btree"

	"github.com/fairlead/fairlead/internal/port/schedule"
)

// entry is kept by pointer, so that a node that is copied on write stays small.
type entry[K, V any] struct {
	key   K
	value V
}

// Table maps K to V in the order of a compare function. All methods are safe
// for concurrent use; views and values read from it are immutable.
type Table[K comparable, V any] struct {
	mu   sync.Mutex
	tree *btree.BTreeG[*entry[K, V]]
	gen  uint64
	// probes are entries to search with, which would otherwise be allocated for each
	// search, as large as a value.
	probes *sync.Pool
	subs   map[*Subscription[K, V]]struct{}
	choosy map[*Subscription[K, V]]struct{} // those with a match
}

// New returns an empty table at generation 0.
func New[K comparable, V any](compare func(a, b K) int) *Table[K, V] {
	less := func(a, b *entry[K, V]) bool { return compare(a.key, b.key) < 0 }
	return &Table[K, V]{
		tree:   btree.NewBTreeGOptions(less, btree.Options{NoLocks: true}),
		probes: &sync.Pool{New: func() any { return new(entry[K, V]) }},
		subs:   make(map[*Subscription[K, V]]struct{}),
		choosy: make(map[*Subscription[K, V]]struct{}),
	}
}

// Tx is one step of changes. It is valid only during the Update that made it.
type Tx[K comparable, V any] struct {
	t       *Table[K, V]
	changed []K
}

// Get returns the value of k within the step.
func (tx *Tx[K, V]) Get(k K) (v V, ok bool) {
	if e, ok := find(tx.t.tree, tx.t.probes, k); ok {
		return e.value, true
	}
	return v, false
}

// Put sets k to v. To be called only if v differs from the current value.
func (tx *Tx[K, V]) Put(k K, v V) { tx.set(&entry[K, V]{k, v}) }

func (tx *Tx[K, V]) set(e *entry[K, V]) {
	old, _ := tx.t.tree.Set(e)
	tx.note(e.key, old, e)
}

// note notes that the entry of k was old, and is next; nil is none.
func (tx *Tx[K, V]) note(k K, old, next *entry[K, V]) {
	tx.changed = append(tx.changed, k)
	for s := range tx.t.choosy {
		if old != nil && s.match(old.value) || next != nil && s.match(next.value) {
			s.add(k)
			s.touched = true
		}
	}
}

// Share sets k to its value in v, without a second copy in memory, and reports
// whether v has k. To be called only if that differs from the current value.
func (tx *Tx[K, V]) Share(v View[K, V], k K) bool {
	e, ok := find(v.tree, v.probes, k)
	if !ok {
		return false
	}
	tx.set(e)
	return true
}

// Delete removes k if it is there.
func (tx *Tx[K, V]) Delete(k K) {
	probe := tx.t.probes.Get().(*entry[K, V])
	probe.key = k
	old, ok := tx.t.tree.Delete(probe)
	tx.t.probes.Put(probe)
	if ok {
		tx.note(k, old, nil)
	}
}

// Range returns the keys from first to last, both included, within the step.
func (tx *Tx[K, V]) Range(first, last K) (keys []K) {
	t := tx.t
	start, end := t.probes.Get().(*entry[K, V]), t.probes.Get().(*entry[K, V])
	start.key, end.key = first, last
	t.tree.Ascend(start, func(e *entry[K, V]) bool {
		if t.tree.Less(end, e) {
			return false
		}
		keys = append(keys, e.key)
		return true
	})
	t.probes.Put(start)
	t.probes.Put(end)
	return keys
}

// Update runs f and, if f changed anything, raises the generation by one and
// notifies the subscribers. f must not call back into the table. It returns the
// generation after it.
func (t *Table[K, V]) Update(f func(*Tx[K, V])) uint64 {
	generation, told := t.update(f)
	for _, on := range told {
		on()
	}
	return generation
}

// update is Update without the calls of OnChange, which it returns.
func (t *Table[K, V]) update(f func(*Tx[K, V])) (generation uint64, told []func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tx := Tx[K, V]{t: t}
	f(&tx)
	if len(tx.changed) == 0 {
		return t.gen, nil
	}
	t.gen++
	tell := func(s *Subscription[K, V]) {
		s.c.Notify()
		if s.on != nil {
			told = append(told, s.on)
		}
	}
	for s := range t.subs {
		if s.keys != nil {
			for _, k := range tx.changed {
				s.add(k)
			}
		}
		tell(s)
	}
	for s := range t.choosy {
		if s.touched {
			s.touched = false
			tell(s)
		}
	}
	return t.gen, told
}

// View returns the current state of the table, in constant time.
func (t *Table[K, V]) View() View[K, V] {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.view()
}

func (t *Table[K, V]) view() View[K, V] {
	return View[K, V]{tree: t.tree.Copy(), gen: t.gen, probes: t.probes}
}

// Subscribe returns a subscription whose first Take names every key.
// The caller must Close it.
func (t *Table[K, V]) Subscribe() *Subscription[K, V] { return t.subscribe(t.subs, nil) }

// Watch is Subscribe for those who need not know which keys changed: Take names none.
func (t *Table[K, V]) Watch() *Subscription[K, V] {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &Subscription[K, V]{t: t, c: schedule.NewSignal()}
	s.c.Notify()
	t.subs[s] = struct{}{}
	return s
}

// SubscribeTo is Subscribe for the keys whose value match selects now or did before. It is
// woken for these alone. match must be a pure function.
func (t *Table[K, V]) SubscribeTo(match func(V) bool) *Subscription[K, V] {
	return t.subscribe(t.choosy, match)
}

func (t *Table[K, V]) subscribe(among map[*Subscription[K, V]]struct{}, match func(V) bool) *Subscription[K, V] {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &Subscription[K, V]{t: t, c: schedule.NewSignal(), keys: make(map[K]struct{}), match: match}
	t.tree.Scan(func(e *entry[K, V]) bool {
		if match == nil || match(e.value) {
			s.add(e.key)
		}
		return true
	})
	s.c.Notify()
	among[s] = struct{}{}
	return s
}

// Subscription collects the keys that changed since it was last read. Its memory
// is bounded by the number of different keys that changed.
type Subscription[K comparable, V any] struct {
	t       *Table[K, V]
	c       schedule.Signal
	on      func()         // see OnChange
	match   func(V) bool   // nil: all
	touched bool           // by the step that runs, with match
	keys    map[K]struct{} // nil: none are named
	list    []K            // of keys, in order of change: neighbours in a table are faster to look up in a row
	base    uint64
}

func (s *Subscription[K, V]) add(k K) {
	n := len(s.keys)
	if s.keys[k] = struct{}{}; len(s.keys) > n {
		s.list = append(s.list, k)
	}
}

// C receives when there is something to Take, with a capacity of one.
func (s *Subscription[K, V]) C() <-chan struct{} { return s.c }

// OnChange has f called after each step for which C receives, by the goroutine that made the
// step, once the table is free again. f must not wait. To be called once, before others have
// the subscription.
func (s *Subscription[K, V]) OnChange(f func()) {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	s.on = f
}

// Take returns the current view of the table and what changed since the last
// Take, in the order of the changes.
func (s *Subscription[K, V]) Take() (View[K, V], Change[K]) {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	c := Change[K]{Base: s.base, Generation: s.t.gen, Keys: s.list}
	s.list = nil
	// A map keeps the memory of its largest burst; a new one releases it.
	if len(s.keys) > 1024 {
		s.keys = make(map[K]struct{})
	} else {
		clear(s.keys) // may be nil
	}
	s.base = s.t.gen
	return s.t.view(), c
}

// Close ends the subscription. It may be called more than once.
func (s *Subscription[K, V]) Close() {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	delete(s.t.subs, s)
	delete(s.t.choosy, s)
}

// Change names the keys that differ, or may differ, between two generations. A
// key that the later view holds was put, one that it lacks was removed.
type Change[K comparable] struct {
	Base, Generation uint64
	Keys             []K
}

// View is a table at one generation. The zero View is empty.
type View[K comparable, V any] struct {
	tree   *btree.BTreeG[*entry[K, V]]
	gen    uint64
	probes *sync.Pool
}

// Generation returns the number of changes that led to this view.
func (v View[K, V]) Generation() uint64 { return v.gen }

// Len returns the number of keys.
func (v View[K, V]) Len() int {
	if v.tree == nil {
		return 0
	}
	return v.tree.Len()
}

// Has reports whether there is a value of k.
func (v View[K, V]) Has(k K) bool {
	_, ok := find(v.tree, v.probes, k)
	return ok
}

// Get returns the value of k.
func (v View[K, V]) Get(k K) (value V, ok bool) {
	if e, ok := find(v.tree, v.probes, k); ok {
		return e.value, true
	}
	return value, false
}

// All yields keys and values in order.
func (v View[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		if v.tree == nil {
			return
		}
		v.tree.Scan(func(e *entry[K, V]) bool { return yield(e.key, e.value) })
	}
}

// Range yields keys and values from first to last, both included, in order.
func (v View[K, V]) Range(first, last K) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		if v.tree == nil {
			return
		}
		end := &entry[K, V]{key: last}
		v.tree.Ascend(&entry[K, V]{key: first}, func(e *entry[K, V]) bool {
			return !v.tree.Less(end, e) && yield(e.key, e.value)
		})
	}
}

func find[K comparable, V any](tree *btree.BTreeG[*entry[K, V]], probes *sync.Pool, k K) (*entry[K, V], bool) {
	if tree == nil {
		return nil, false
	}
	probe := probes.Get().(*entry[K, V])
	probe.key = k
	e, ok := tree.Get(probe)
	probes.Put(probe)
	return e, ok
}
