// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/guest/source/kube/object"
	"github.com/fairlead/fairlead/internal/port"
)

// state is everything the source knows. It outlives sessions, so that it can be
// compared or withdrawn after the server is lost. Reflectors write to it, each in
// its goroutine.
type state struct {
	log   *slog.Logger
	feed  registry.Feed
	facts *facts

	mu       sync.Mutex
	warnings engine.Warnings
	services map[string]service        // by namespace/name
	slices   map[string][]endpoints    // by namespace/service; sorted by name
	reported map[string][]port.Binding // by namespace/name
	// unknown is where endpoints cannot be read, by namespace: a Service is not
	// shown as served or not then.
	unknown map[string]bool
	missing int // first lists of this session that have not come
	up      func()
	cluster string        // of all owners, "" if there is one
	listed  func() string // notes that a cluster is listed, and returns its name; nil if there is one
}

func newState(log *slog.Logger, feed registry.Feed, facts *facts) *state {
	return &state{
		log: log, feed: feed, facts: facts,
		warnings: engine.Warnings{Feed: feed},
		services: make(map[string]service),
		slices:   make(map[string][]endpoints),
		reported: make(map[string][]port.Binding),
		unknown:  make(map[string]bool),
	}
}

// begin starts a session: nothing is reported before that many first lists arrived.
func (st *state) begin(lists int, up func()) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.missing, st.up = lists, up
	clear(st.unknown)
}

// arrived counts a first list, and reports the complete set when it was the last.
func (st *state) arrived() {
	if st.missing--; st.missing > 0 {
		return
	}
	if st.listed != nil {
		st.rename(st.listed())
	}
	var set []port.Binding
	for id := range st.reported {
		if _, ok := st.services[id]; !ok {
			st.warnings.Set(id, nil)
		}
	}
	clear(st.reported)
	for _, id := range slices.Sorted(maps.Keys(st.services)) {
		st.reported[id] = st.declare(id)
		set = append(set, st.reported[id]...)
	}
	st.feed.Replace(set)
	st.facts.Announce()
	st.up()
}

// declare makes the bindings of a Service that is there.
func (st *state) declare(id string) []port.Binding {
	s := st.services[id]
	bs, warnings := s.declare(st.cluster, st.slices[id], !st.unknown[s.namespace] && !st.unknown[""])
	st.warnings.Set(id, warnings)
	return bs
}

// update reports what changed of one Service, if anything did.
func (st *state) update(id string) {
	if st.missing > 0 {
		return
	}
	var next []port.Binding
	if _, ok := st.services[id]; ok {
		next = st.declare(id)
	} else {
		st.warnings.Set(id, nil)
	}
	old := st.reported[id]
	var c port.Change
	for _, b := range old {
		if !slices.ContainsFunc(next, func(n port.Binding) bool { return n.Origin == b.Origin }) {
			c.Drop = append(c.Drop, b.Origin)
		}
	}
	for _, b := range next {
		i := slices.IndexFunc(old, func(o port.Binding) bool { return o.Origin == b.Origin })
		if i < 0 || !same(old[i], b) {
			c.Put = append(c.Put, b)
		}
	}
	if len(next) == 0 {
		delete(st.reported, id)
	} else {
		st.reported[id] = next
	}
	if len(c.Drop)+len(c.Put) > 0 {
		st.feed.Apply(c)
	}
	st.facts.Announce()
}

func same(a, b port.Binding) bool {
	return a.Key == b.Key && a.Withheld == b.Withheld && a.Detail.Equal(b.Detail) &&
		slices.Equal(a.Dial, b.Dial) && a.Owner.Equal(b.Owner)
}

// withdraw takes everything back.
func (st *state) withdraw() {
	st.mu.Lock()
	defer st.mu.Unlock()
	var c port.Change
	for _, bs := range st.reported {
		for _, b := range bs {
			c.Drop = append(c.Drop, b.Origin)
		}
	}
	clear(st.services)
	clear(st.slices)
	clear(st.reported)
	st.facts.Retain(func(string, engine.Fact) bool { return false })
	st.warnings.Clear()
	st.feed.Apply(c)
}

// in reports whether an object's key is of a namespace; "" is all of them.
func in(namespace, key string) bool {
	return namespace == "" || strings.HasPrefix(key, namespace+"/")
}

// serviceStore takes what a reflector of Services brings.
type serviceStore struct {
	*state
	namespace string
	synced    bool
}

var _ cache.ReflectorStore = (*serviceStore)(nil)

// Add implements cache.ReflectorStore.
func (s *serviceStore) Add(obj any) error {
	o, ok := obj.(*object.Service)
	if !ok {
		return fmt.Errorf("a %T among services", obj)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	v := compact(o)
	s.services[v.id()] = v
	s.update(v.id())
	return nil
}

// Update implements cache.ReflectorStore.
func (s *serviceStore) Update(obj any) error { return s.Add(obj) }

// Delete implements cache.ReflectorStore.
func (s *serviceStore) Delete(obj any) error {
	o, ok := obj.(*object.Service)
	if !ok {
		return fmt.Errorf("a %T among services", obj)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	id := o.Namespace + "/" + o.Name
	delete(s.services, id)
	s.update(id)
	return nil
}

// Replace implements cache.ReflectorStore.
func (s *serviceStore) Replace(list []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := make(map[string]service, len(list))
	for _, obj := range list {
		o, ok := obj.(*lean[service])
		if !ok {
			return fmt.Errorf("a %T among services", obj)
		}
		next[o.value.id()] = o.value
	}
	var touched []string
	for id := range s.services {
		if _, stays := next[id]; !stays && in(s.namespace, id) {
			delete(s.services, id)
			touched = append(touched, id)
		}
	}
	for id, v := range next {
		s.services[id] = v
		touched = append(touched, id)
	}
	if !s.synced {
		s.synced = true
		s.arrived()
		return nil
	}
	for _, id := range touched {
		s.update(id)
	}
	return nil
}

// Resync implements cache.ReflectorStore. There is nothing to repeat.
func (s *serviceStore) Resync() error { return nil }

// sliceStore takes what a reflector of EndpointSlices brings.
type sliceStore struct {
	*state
	namespace string
	synced    bool
}

var _ cache.ReflectorStore = (*sliceStore)(nil)

// unknown notes that endpoints cannot be read in this namespace.
func (s *sliceStore) unknown(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state.unknown[s.namespace] = true
	s.warnings.Set("endpointslices of "+s.namespace, []string{fmt.Sprintf("who serves a Service is not known: %v", err)})
	if !s.synced {
		s.synced = true
		s.arrived()
		return
	}
	for id := range s.services {
		if in(s.namespace, id) {
			s.update(id)
		}
	}
}

// record takes in a slice, which has a Service, and returns the facts of the
// slice as it was.
func (s *sliceStore) record(v endpoints) (gone []string) {
	gone = s.forget(v.id, v.name)
	v.objects = slices.Collect(maps.Keys(v.facts))
	v.facts = nil
	i, _ := slices.BinarySearchFunc(s.slices[v.id], v.name, byName)
	s.slices[v.id] = slices.Insert(s.slices[v.id], i, v)
	return gone
}

// forget removes a slice and returns its facts, which are still in the table.
func (s *sliceStore) forget(id, name string) (facts []string) {
	all := s.slices[id]
	i, ok := slices.BinarySearchFunc(all, name, byName)
	if !ok {
		return nil
	}
	facts = all[i].objects
	if len(all) == 1 {
		delete(s.slices, id)
	} else {
		s.slices[id] = slices.Delete(all, i, i+1)
	}
	return facts
}

func byName(e endpoints, name string) int { return cmp.Compare(e.name, name) }

// Add implements cache.ReflectorStore.
func (s *sliceStore) Add(obj any) error {
	o, ok := obj.(*object.EndpointSlice)
	if !ok {
		return fmt.Errorf("a %T among endpointslices", obj)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if v := compactSlice(o); v.id != "" {
		s.facts.readLocal()
		facts := s.inCluster(v.facts)
		s.facts.Swap(s.record(v), facts)
		s.update(v.id)
	}
	return nil
}

// Update implements cache.ReflectorStore.
func (s *sliceStore) Update(obj any) error { return s.Add(obj) }

// Delete implements cache.ReflectorStore.
func (s *sliceStore) Delete(obj any) error {
	o, ok := obj.(*object.EndpointSlice)
	if !ok {
		return fmt.Errorf("a %T among endpointslices", obj)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if id := serviceOf(o); id != "" {
		s.facts.Swap(s.forget(id, o.Namespace+"/"+o.Name), nil)
		s.update(id)
	}
	return nil
}

// Replace implements cache.ReflectorStore.
func (s *sliceStore) Replace(list []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	touched := make(map[string]bool)
	var gone []string
	facts := make(map[string]engine.Fact)
	for id, all := range s.slices {
		if !in(s.namespace, id) {
			continue
		}
		for _, v := range all {
			gone = append(gone, v.objects...)
		}
		delete(s.slices, id)
		touched[id] = true
	}
	for _, obj := range list {
		o, ok := obj.(*lean[endpoints])
		if !ok {
			return fmt.Errorf("a %T among endpointslices", obj)
		}
		if v := o.value; v.id != "" {
			maps.Copy(facts, v.facts)
			s.record(v)
			touched[v.id] = true
		}
	}
	s.facts.readLocal()
	s.facts.Swap(gone, s.inCluster(facts))
	delete(s.state.unknown, s.namespace)
	s.warnings.Set("endpointslices of "+s.namespace, nil)
	if !s.synced {
		s.synced = true
		s.arrived()
		return nil
	}
	for id := range touched {
		s.update(id)
	}
	return nil
}

// Resync implements cache.ReflectorStore.
func (s *sliceStore) Resync() error { return nil }
